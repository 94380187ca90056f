"""Two weights of one shape, under one path and with one folder of storage, and engines that are killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from integration.models import tiny
from integration.tests.sglang_engines import SglangEngine, answers_alone, running
from kv_connector.testing.engine_contract import Expected, loadable, prompts
from tests.waiting import until

NAMES = ("one", "other")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their folders. Nothing but the content of one file tells them apart: its size and its time do not."""
    from safetensors.torch import load_file, save_file

    base = tmp_path_factory.mktemp("weights")
    folders = {name: tiny.write_weights("dense", base / name) for name in NAMES}
    file = folders["other"] / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if "v_proj" in name:
            tensors[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * tensor.std()
    save_file(tensors, file, metadata={"format": "pt"})
    for folder in folders.values():
        os.utime(folder / "model.safetensors", ns=(10**18, 10**18))
    assert len({(folder / "model.safetensors").stat().st_size for folder in folders.values()}) == 1
    return folders


@pytest.fixture(scope="module")
def answers(weights: dict[str, Path]) -> Iterator[dict[str, Expected]]:
    """What each says without us."""
    with answers_alone(weights["one"].parent) as one, answers_alone(weights["other"].parent) as other:
        yield {"one": one, "other": other}


def link(live: Path, folder: Path) -> None:
    """The path is a link from now on, or another one."""
    if live.is_symlink():
        live.unlink()
    elif live.exists():
        shutil.rmtree(live)
    live.symlink_to(folder)


def overwrite(live: Path, folder: Path) -> None:
    """The files at the path have other bytes from now on, and the same times."""
    live.mkdir(exist_ok=True)
    for file in folder.iterdir():
        with open(live / file.name, "r+b" if (live / file.name).exists() else "wb") as target:
            target.write(file.read_bytes())
        os.utime(live / file.name, ns=(10**18, 10**18))


def test_no_answer_is_computed_from_what_other_weights_have_cached(
    weights: dict[str, Path], answers: dict[str, Expected], tmp_path: Path
) -> None:
    """Whatever becomes of the path between two starts, or of the weights in between; each start finds what the same
    weights have stored, but for what was stored since an update."""
    live, folder = tmp_path / "live" / "dense", tmp_path / "kv"
    live.parent.mkdir()
    settings = {"storage": {"path": str(folder), "capacity": "1GiB", "prefetch": "timeout", "timeout_ms": 30_000}}
    known: dict[str, set[int]] = {name: set() for name in NAMES}
    lives: list[str] = []

    def ask(engine: SglangEngine, name: str, seed: int) -> list[int]:
        """The same prompts of both weights; how much of each was loaded."""
        asked = prompts(engine, 3, seed=seed)
        assert answers["one"](asked, 8) != answers["other"](asked, 8)
        said = engine.generate(asked)
        assert [answer.token_ids for answer in said] == answers[name](asked, 8), (name, seed)
        return [answer.num_loaded for answer in said]

    def life(name: str, updates_to: str | None = None) -> None:
        """An engine's, from its start to a kill in the middle of requests."""
        lives.append(name)
        with running(live.parent, settings) as engine:
            for seed in range(3):
                (length,) = {loadable(engine, prompt) for prompt in prompts(engine, 3, seed=seed)}
                assert ask(engine, name, seed) == [length if seed in known[name] else 0] * 3, (name, seed)
                engine.check_idle()  # all of it is stored
                known[name].add(seed)
            if updates_to is not None:
                assert engine.engine.update_weights_from_disk(str(weights[updates_to]))[0]
                assert ask(engine, updates_to, 0) == ask(engine, updates_to, 1) == [0] * 3
                engine.check_idle()
            num_before = engine.stats()["known_blocks"]
            engine.start(prompts(engine, 4, seed=f"killed {len(lives)}"), num_tokens=100)
            until(lambda: engine.stats()["known_blocks"] > num_before)

    overwrite(live, weights["one"])
    life("one")
    overwrite(live, weights["other"])
    life("other", updates_to="one")
    overwrite(live, weights["one"])
    life("one", updates_to="other")
    link(live, weights["other"])
    life("other")
    link(live, weights["one"])
    life("one")
