"""A restarted vLLM whose weights, settings, backend or adapter have changed finds nothing of before, and answers right.

Each of them changes what a layer writes into the cache, and neither prompts nor vLLM's own block hashes tell.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

import torch
from safetensors.torch import load_file, save_file

from integration.models import tiny
from integration.tests.vllm_engines import prompts, running, transfer_config, vllm_version
from kv_connector.engines.vllm import identity
from kv_connector.engines.vllm.identity import Adapters, ReplacedAdapters, local_fingerprint, read_identity
from kv_connector.errors import ConfigError
from kv_connector.index import CacheIdentity

NUM_BLOCKS = 2 * 13
ASKED = prompts(2)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 10000.0}

pytestmark = pytest.mark.usefixtures("stable_hashes", "slow_machine")


def start(folder: Path, stores: bool = True, adapter: Any = None, **options: Any) -> tuple[list[list[int]], int]:
    """An engine on the model in the folder, from start to end: what it answers, and how many blocks it found."""
    storage = {"path": str(folder / "store"), "capacity": "64MiB", "prefetch": "wait_complete"}
    settings = {"write_policy": "write_through"} | ({"storage": storage} if stores else {})
    with running(folder, num_blocks=200, kv_transfer_config=transfer_config(settings), **options) as engine:
        answers = engine.alone(ASKED, adapter=adapter)
        again = engine.alone(ASKED, adapter=adapter)
        engine.check_all_free()
        found = int(engine.stats().get("fetched_blocks", 0))
    return (again if found == 0 else answers), found


def changed_parts(folder: Path) -> set[str]:
    """What the folder says is different between the last two identities that have used it."""
    files = sorted((folder / "store" / "identities").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    before, after = (json.loads(path.read_text()) for path in files[-2:])
    return {name for name in after if before[name] != after[name]}


def retrain(path: Path) -> None:
    """Other weights in the same file: names, shapes and size stay."""
    weights = load_file(path)
    generator = torch.Generator().manual_seed(7)
    save_file(
        {
            name: tensor + torch.randn(tensor.shape, generator=generator) * tensor.std() if tensor.dim() > 1 else tensor
            for name, tensor in weights.items()
        },
        path,
        metadata={"format": "pt"},
    )


def test_weights_that_were_replaced_at_the_same_path(tmp_path: Path) -> None:
    old, found = start(tmp_path)
    assert found == 0
    assert start(tmp_path) == (old, NUM_BLOCKS), "the same weights find everything"
    path = tmp_path / "dense" / "model.safetensors"
    size = path.stat().st_size
    retrain(path)
    assert path.stat().st_size == size
    right, _ = start(tmp_path, stores=False)
    assert right != old
    assert start(tmp_path) == (right, 0)
    assert changed_parts(tmp_path) == {"weights"}
    assert start(tmp_path) == (right, NUM_BLOCKS)


def test_yarn_on_and_off(tmp_path: Path) -> None:
    off, _ = start(tmp_path)
    yarn = {"hf_overrides": {"rope_parameters": YARN, "rope_scaling": YARN}}
    right, _ = start(tmp_path, stores=False, **yarn)
    assert right != off
    assert start(tmp_path, **yarn) == (right, 0)
    assert changed_parts(tmp_path) == {"config", "settings"}
    assert start(tmp_path) == (off, NUM_BLOCKS), "what was stored without it is found again"


def test_another_attention_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM has one: another class takes its place."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import cpu_attn

    if not current_platform.is_cpu():
        pytest.skip("the class that is put in place is the CPU's")
    if vllm_version().startswith("0.20"):
        pytest.skip("its workers are processes of their own, in which the class stays")
    right, _ = start(tmp_path)
    other = type("OtherBackend", (cpu_attn.CPUAttentionBackend,), {})
    monkeypatch.setattr(cpu_attn, "CPUAttentionBackend", other)
    clear_choice()
    assert start(tmp_path) == (right, 0)
    assert changed_parts(tmp_path) == {"backend"}
    monkeypatch.undo()
    clear_choice()


def identity_of(
    path: Path,
    multimodal: dict[str, Any] | None = None,
    mamba: dict[str, Any] | None = None,
    groups: Sequence[Any] = (),
    **options: Any,
) -> CacheIdentity:
    """As an engine with these options would read it."""
    from vllm.config.multimodal import MultiModalConfig
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(path), skip_tokenizer_init=True, dtype="float32", **options).create_engine_config()
    if multimodal is not None:
        config.model_config.multimodal_config = MultiModalConfig(**multimodal)
    for name, value in (mamba or {}).items():
        setattr(config.mamba_config, name, value)
    return read_identity(config, SimpleNamespace(kv_cache_layout=None, kv_cache_groups=groups), 32)


def test_what_is_made_of_an_image_is_named(tmp_path: Path) -> None:
    """vLLM hashes an image as it was sent, so under one hash lies what another size or normalisation has made of it."""
    folder = tiny.write_weights("dense", tmp_path)
    plain = identity_of(folder, {})
    assert identity_of(folder, {}) == plain
    for changed in ({"mm_processor_kwargs": {"max_pixels": 100352}}, {"video_pruning_rate": 0.5}):
        assert identity_of(folder, changed).settings != plain.settings


def test_how_states_are_computed_and_rounded_is_named(tmp_path: Path) -> None:
    """Where a layer has any; vLLM's own hash of its configuration leaves it out."""
    pytest.importorskip("vllm.config.mamba", reason="newer versions have these settings")
    folder = tiny.write_weights("dense", tmp_path)
    spec = SimpleNamespace(dtypes=("float16",), shapes=((3, 4),))
    states = [SimpleNamespace(kv_cache_spec=spec)]
    plain, none = identity_of(folder, groups=states), identity_of(folder)
    settings = {"enable_stochastic_rounding": True, "stochastic_rounding_philox_rounds": 10, "backend": "flashinfer"}
    for name, value in settings.items():
        assert identity_of(folder, groups=states, mamba={name: value}).settings != plain.settings
        assert identity_of(folder, mamba={name: value}) == none


def test_who_looks_for_drafts_in_tokens_caches_what_others_do(tmp_path: Path) -> None:
    """vLLM names the model itself as that of the drafts, and a draft model is named."""
    folder = tiny.write_weights("dense", tmp_path)
    plain = identity_of(folder)
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert identity_of(folder, speculative_config=ngram) == plain
    eagle = {"method": "eagle", "num_speculative_tokens": 2, "model": str(tiny.write_draft(tmp_path))}
    assert identity_of(folder, speculative_config=eagle).draft_weights


def test_which_weights_of_a_folder_are_read_is_named(tmp_path: Path) -> None:
    folder = tiny.write_weights("dense", tmp_path)
    plain = identity_of(folder)
    assert identity_of(folder, load_format="safetensors") == plain, "the same files"
    pt = identity_of(folder, load_format="pt")
    assert pt.weights != plain.weights
    some = identity_of(folder, ignore_patterns=["*-00002-*"])
    assert some.weights not in (plain.weights, pt.weights)


def clear_choice() -> None:
    """vLLM remembers which backend it has chosen."""
    from vllm.v1.attention import selector

    for value in vars(selector).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def test_an_adapter_that_was_retrained_at_the_same_path(tmp_path: Path) -> None:
    """vLLM hashes its name, and in newer versions its path."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("a", 1, str(tiny.write_adapter(tmp_path / "adapter", seed=1)))
    options: dict[str, Any] = {"adapter": adapter, "enable_lora": True, "max_lora_rank": 8}
    old, _ = start(tmp_path, **options)
    assert start(tmp_path, **options) == (old, NUM_BLOCKS), "the same adapter finds everything"
    tiny.write_adapter(tmp_path / "adapter", seed=2)
    right, _ = start(tmp_path, stores=False, **options)
    assert right != old
    assert start(tmp_path, **options) == (right, 0)
    assert start(tmp_path, **options) == (right, NUM_BLOCKS)


def test_an_adapter_that_was_replaced_and_read_anew_without_a_word(tmp_path: Path) -> None:
    """vLLM keeps no more than one here: the first is read again after the second, from whatever lies there."""
    from vllm.lora.request import LoRARequest

    path = tiny.write_adapter(tmp_path / "adapter", seed=1)
    old = shutil.copytree(path, tmp_path / "old")
    adapter, other = (
        LoRARequest(name, number, str(folder))
        for number, name, folder in ((1, "a", path), (2, "b", tiny.write_adapter(tmp_path / "other", seed=3)))
    )
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    right, _ = start(tmp_path, stores=False, adapter=adapter, **options)
    storage = {"path": str(tmp_path / "store"), "capacity": "64MiB", "prefetch": "wait_complete"}
    config = transfer_config({"write_policy": "write_through", "storage": storage})
    least = {"max_loras": 1, "max_cpu_loras": 1}
    with running(tmp_path, num_blocks=200, kv_transfer_config=config, **least, **options) as engine:
        engine.alone(ASKED[:1], adapter=adapter)
        engine.alone(ASKED[:1], adapter=other)
        tiny.write_adapter(path, seed=2)
        assert engine.alone(ASKED[1:], adapter=adapter) != right[1:], "vLLM has read it anew"
        engine.check_all_free()
    shutil.rmtree(path)
    shutil.copytree(old, path)
    assert start(tmp_path, adapter=adapter, **options) == (right, NUM_BLOCKS // 2)


def test_scales_that_change_with_every_start_are_refused(tmp_path: Path) -> None:
    from vllm.config import CacheConfig

    if not hasattr(CacheConfig, "calculate_kv_scales"):
        pytest.skip("this vLLM takes scales from the checkpoint alone")
    with pytest.raises((ConfigError, RuntimeError), match="take the scales of the checkpoint"):
        start(tmp_path, calculate_kv_scales=True)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def weights_of(model: str, load_format: str = "auto", model_weights: str = "", tp_size: int = 1, **load: Any) -> str:
    """What the weights are known by, of a model and a load configuration as vLLM has them."""
    config = SimpleNamespace(model=model, model_weights=model_weights, revision=None, seed=3)
    load = {
        "load_format": load_format,
        "download_dir": None,
        "model_loader_extra_config": {},
        "ignore_patterns": [],
    } | load
    return identity._weights(config, SimpleNamespace(**load), tp_size)


def test_what_weights_are_known_by(tmp_path: Path) -> None:
    """A hub's snapshot by its commit, wherever it was downloaded to; one file by itself; dummies by their seed."""
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    for folder in (snapshot, tmp_path / "local"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert weights_of("org/name", download_dir=str(tmp_path / "hub")) == f"commit {COMMIT}"
    assert weights_of(str(snapshot)) == f"commit {COMMIT}"
    assert weights_of(str(tmp_path / "local")).startswith("1 file of 7 bytes, ")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert weights_of(str(tmp_path / "model.gguf"), "gguf").startswith("1 file of 4 bytes, ")
    assert weights_of(str(tmp_path / "local"), "runai_streamer").startswith("1 file of 7 bytes, ")
    assert weights_of(str(tmp_path / "local"), "dummy").startswith("dummy, seed 3")


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state", "bitsandbytes", "tensorizer", "a_plugin"])
def test_weights_that_depend_on_how_ranks_divide_them_are_others_for_another_tp_size(
    tmp_path: Path, load_format: str
) -> None:
    """The ranks of TP 2 draw dummies that are no parts of those of TP 1: what one computes is another model's."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert weights_of(str(tmp_path), load_format, tp_size=1) != weights_of(str(tmp_path), load_format, tp_size=2)


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "gguf", "runai_streamer"])
def test_weights_that_ranks_divide_are_the_same_for_any_tp_size(tmp_path: Path, load_format: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert weights_of(str(tmp_path), load_format, tp_size=1) == weights_of(str(tmp_path), load_format, tp_size=2)


def test_what_cannot_be_looked_at_is_known_by_its_place_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(identity.logger, "warning", lambda text, *values: said.append(text % values))
    (tmp_path / "model.safetensors").write_bytes(b"not what is loaded")
    uris = [{"tensorizer_uri": f"s3://bucket/{name}"} for name in "ab"]
    found = [weights_of(str(tmp_path), "tensorizer", model_loader_extra_config=uri) for uri in uris]
    assert len({*found, weights_of(str(tmp_path / "other"), "tensorizer", model_loader_extra_config=uris[0])}) == 3
    streamed = weights_of(str(tmp_path), "runai_streamer", model_weights="s3://bucket/model")
    assert "s3://bucket/model" in streamed
    said.clear()
    assert weights_of(str(tmp_path), "runai_streamer", model_weights="s3://bucket/model") == streamed
    assert said == [], "once"
    weights_of(str(tmp_path), "runai_streamer", model_weights="s3://bucket/new")
    assert len(said) == 1
    assert "clear the storage" in said[0]


class Asked:
    """A request, as far as adapters are concerned."""

    def __init__(self, adapter: Any) -> None:
        self.lora_request = adapter


def test_an_adapter_is_known_by_its_weights(tmp_path: Path) -> None:
    """Once it has changed under its name, what this process computes with it is for nobody else, whatever follows."""
    from vllm.lora.request import LoRARequest

    path = tiny.write_adapter(tmp_path / "adapter", seed=1)
    times = os.stat(path / "adapter_model.safetensors").st_mtime_ns
    first, second = LoRARequest("a", 1, str(path)), LoRARequest("a", 2, str(path))
    adapters = Adapters()
    assert adapters(Asked(None)) == ""
    known = adapters(Asked(first))
    assert known == local_fingerprint(str(path)) == adapters(Asked(second))
    tiny.write_adapter(path, seed=2)
    unsure = adapters(Asked(first))
    assert unsure not in (known, local_fingerprint(str(path))), "vLLM may have read it again, or not"
    assert adapters(Asked(first)) == unsure
    assert Adapters()(Asked(first)) == local_fingerprint(str(path)) != known
    changed = adapters(Asked(LoRARequest("a", 3, str(path))))
    assert changed not in (known, local_fingerprint(str(path)))
    tiny.write_adapter(path, seed=1)
    os.utime(path / "adapter_model.safetensors", ns=(times, times))
    assert local_fingerprint(str(path)) == known
    assert adapters(Asked(LoRARequest("a", 4, str(path)))) != known, "vLLM's own cache may have both"
    later = Adapters()
    assert later(Asked(first)) == known
    shutil.rmtree(path)
    assert later(Asked(first)) not in ("", known), "vLLM may have read others before"
    lost = LoRARequest("b", 5, str(tmp_path / "nowhere"))
    assert adapters(Asked(lost)) not in ("", Adapters()(Asked(lost))), "no two processes agree on what has no name"


def test_an_adapter_whose_files_come_or_go_after_its_first_request_is_a_replaced_one(tmp_path: Path) -> None:
    """vLLM had read them before they were gone, or others in between."""
    from vllm.lora.request import LoRARequest

    path = tmp_path / "adapter"
    asked, replaced = Asked(LoRARequest("a", 1, str(path))), ReplacedAdapters()
    assert not replaced.has(Asked(None)) and not replaced.has(asked)
    tiny.write_adapter(path, seed=1)
    assert replaced.has(asked)
    shutil.rmtree(path)
    assert replaced.has(asked)
    replaced.reset()
    tiny.write_adapter(path, seed=1)
    assert not replaced.has(asked)
    shutil.rmtree(path)
    assert replaced.has(asked)


@pytest.mark.parametrize("has_path", [True, False])
def test_an_adapter_of_the_same_name_at_another_path_is_a_replaced_one_where_hashes_have_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_path: bool
) -> None:
    from vllm.lora.request import LoRARequest

    def hashed(request: Asked) -> list[str]:
        return [request.lora_request.lora_name, *([request.lora_request.lora_path] if has_path else [])]

    monkeypatch.setattr(identity, "_hashed", hashed)
    first, second = (Asked(LoRARequest("a", i, str(tiny.write_adapter(tmp_path / f"a{i}", seed=i)))) for i in (1, 2))
    replaced = ReplacedAdapters()
    assert [replaced.has(asked) for asked in (first, second, first)] == [False, *[not has_path] * 2]
    one, two = (Asked(LoRARequest("b", i, f"of-a-hub/{i}")) for i in (3, 4))
    assert [replaced.has(asked) for asked in (one, two)] == [False, not has_path]
