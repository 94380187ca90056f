"""Which form blocks have on the host where `auto` is asked for, and what a machine remembers of it.

There is no GPU here: the layouts say that their tensors lie on one, and nothing is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kv_connector.build import build_worker
from kv_connector.config import Config, HostFormName
from kv_connector.errors import ConfigError
from kv_connector.index import CacheIdentity
from kv_connector.transfer.costs.curves import BUILT_IN, Curve, LinkCosts
from kv_connector.transfer.form_choice import FormChooser
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.types import StepPlan

BLOCKS = 4


def layout(num_coded: int = 16, num_other: int = 0, device: str = "cuda", elements: int = 4096) -> CacheLayout:
    """So many layers of bf16, and of fp8, in pieces of as many bytes."""
    tensors = {f"layers.{i}": torch.zeros(BLOCKS, elements, dtype=torch.bfloat16) for i in range(num_coded)}
    tensors |= {f"others.{i}": torch.zeros(BLOCKS, 2 * elements, dtype=torch.float8_e4m3fn) for i in range(num_other)}
    found = CacheLayout.from_tensors(tensors, BLOCKS)
    found.device = torch.device(device)
    return found


def config(**settings: object) -> Config:
    return Config.from_mapping({"host_memory": "1GiB", "host_form": "auto", "calibration": "off", **settings})


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """One that remembers nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, "kv_connector.transfer")
    return tmp_path / "kv_connector"


def is_coded(chooser: FormChooser, tensors: CacheLayout | None = None) -> bool:
    return bool(chooser.choose(tensors or layout())[0].name)


def measured(tmp_path: Path, costs: LinkCosts) -> Config:
    (tmp_path / "costs.json").write_text(costs.encode())
    return config(calibration=str(tmp_path / "costs.json"))


def test_a_user_without_a_home_folder_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that runs under any number."""

    def no_home(_: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    chooser = FormChooser(config(), name_of=lambda arrangement: "a" * 32)
    assert is_coded(chooser)
    chooser.note_unfit()
    assert "Give XDG_CACHE_HOME" in caplog.text


def test_a_rank_that_cannot_start_keeps_no_other_waiting(tmp_path: Path) -> None:
    told: list[object] = []

    def exchange(value: object) -> list[object]:
        told.append(value)
        return [value, ""]

    chooser = FormChooser(config(calibration=str(tmp_path / "absent.json")), 2, exchange)
    with pytest.raises(ConfigError, match=r"absent\.json"):
        chooser.choose(layout())
    assert len(told) == 1 and "absent.json" in str(told[0])


def test_blocks_of_bf16_on_a_gpu_are_coded_and_the_log_says_what_that_is_worth(
    caplog: pytest.LogCaptureFixture,
) -> None:
    form, costs = FormChooser(config()).choose(layout())
    assert all(form.is_coded)
    assert costs.load.packing == BUILT_IN.load.coding, "groups and slices go by the coder"
    (line,) = caplog.messages
    assert line.startswith("host_form='auto' is lossless: host blocks have 0.78 of raw ones' bytes, and loads are")
    assert "estimated to take 0.78 of their time (built in: one H200" in line


@pytest.mark.parametrize(
    ("tensors", "settings", "reason"),
    [
        (layout(device="cpu"), {}, "the cache is on the CPU"),
        (layout(0, 16), {}, "coded blocks would have 1.00 of raw ones' bytes"),
        (layout(8, 16), {}, "coded blocks would have 0.94 of raw ones' bytes, and gain from 0.85 down"),
        (layout(), {"copy_path": "runs"}, "copy_path='runs' cannot copy coded blocks"),
        (layout(), {"copy_path": "direct"}, "copy_path='direct' cannot copy coded blocks"),
        (
            layout(1, elements=1 << 17),
            {"staging_memory": "1MiB"},
            "staging_memory=1048576 is too small for coded blocks",
        ),
    ],
)
def test_where_there_is_nothing_to_gain_blocks_are_raw_and_the_log_says_why(
    tensors: CacheLayout, settings: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    form, costs = FormChooser(config(**settings)).choose(tensors)
    assert not form.name and costs is BUILT_IN
    (line,) = caplog.messages
    assert line.startswith(f"host_form='auto' is raw: {reason}")


def test_on_a_link_that_is_faster_than_the_coder_blocks_are_raw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dma = Curve((1 << 10,), (400.0,), 10.0)
    fast = replace(BUILT_IN, load=replace(BUILT_IN.load, dma=dma))
    assert not is_coded(FormChooser(measured(tmp_path, fast)))
    assert "coded loads are estimated to take 1." in caplog.text
    slow = replace(BUILT_IN, load=replace(BUILT_IN.load, dma=replace(dma, gigabytes_per_second=(12.0,))))
    assert is_coded(FormChooser(measured(tmp_path, slow)))


def test_packing_that_a_user_asks_for_may_code() -> None:
    assert is_coded(FormChooser(config(copy_path="staged")))


def test_a_form_that_is_named_is_taken_whatever_is_estimated(caplog: pytest.LogCaptureFixture) -> None:
    assert is_coded(FormChooser(config(host_form="lossless", copy_path="runs")))
    assert not is_coded(FormChooser(config(host_form="raw")))
    assert Config().host_form is HostFormName.RAW
    assert caplog.messages == []


def told(*objections: str) -> list[bool]:
    """What the ranks of an engine come to that have these objections of their own."""
    heard: list[object] = [None] * len(objections)
    tensors = [layout(0, 16) if objection else layout() for objection in objections]
    for _ in range(2):  # the second time each hears what all have said
        coded = []
        for rank, own in enumerate(tensors):

            def exchange(value: object, rank: int = rank) -> Sequence[object]:
                heard[rank] = value
                return list(heard)

            coded.append(is_coded(FormChooser(config(), len(objections), exchange), own))
    return coded


def test_all_ranks_of_an_engine_come_to_one_form(caplog: pytest.LogCaptureFixture) -> None:
    assert told("", "", "") == [True] * 3
    assert told("fp8", "", "") == [False] * 3
    assert told("", "", "fp8") == [False] * 3
    assert "host_form='auto' is raw: on rank 2, coded blocks would have" in caplog.text


@pytest.mark.parametrize("exchange", [None, lambda value: [value]])
def test_ranks_that_cannot_ask_all_the_others_keep_blocks_raw(
    exchange: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert not is_coded(FormChooser(config(), 2, exchange))  # type: ignore[arg-type]
    assert "its 2 ranks cannot ask each other" in caplog.text


def chooser_of(model: str, **settings: object) -> FormChooser:
    """As `build_worker` makes it."""
    return build_worker(config(**settings), identity=CacheIdentity(model, "bf16", "NHD", 16))._forms


def test_a_cache_that_did_not_fit_is_raw_at_the_next_start_and_no_other_is(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = chooser_of("noisy")
    assert is_coded(first)
    for _ in range(2):
        first.note_unfit()
    (note,) = machine.iterdir()
    assert note.stat().st_mode & 0o777 == 0o600
    assert caplog.text.count("will be raw for this cache from the next start on") == 1
    assert not is_coded(chooser_of("noisy"))
    assert f"too much of this cache did not fit at an earlier start ({note.name})" in caplog.text
    assert is_coded(chooser_of("noisy"), layout(17)), "arranged in another way"
    assert is_coded(chooser_of("another"))
    assert is_coded(chooser_of("noisy", host_form="lossless")), "whoever names it has it"
    note.unlink()
    assert is_coded(chooser_of("noisy"))


def test_a_note_that_cannot_be_read_counts(machine: Path) -> None:
    """What it says is for people: that it is there is what counts."""
    chooser = chooser_of("noisy")
    chooser.choose(layout())
    chooser.note_unfit()
    (note,) = machine.iterdir()
    note.write_bytes(b"\xff\xfe")
    assert not is_coded(chooser_of("noisy"))
    note.unlink()
    note.mkdir()
    assert not is_coded(chooser_of("noisy"))


def test_a_machine_that_cannot_look_for_notes_says_so_and_goes_on(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.write_text("not a folder")
    assert is_coded(chooser_of("noisy"))
    assert "has left unfit_" in caplog.text and "cannot be seen" in caplog.text


def test_of_a_cache_without_a_name_nothing_is_remembered(machine: Path) -> None:
    nameless = FormChooser(config())
    assert is_coded(nameless)
    nameless.note_unfit()
    assert not machine.exists()


def test_a_machine_that_cannot_write_says_so_and_goes_on(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine.write_text("not a folder")
    chooser = chooser_of("noisy")
    assert is_coded(chooser)
    chooser.note_unfit()
    assert "cannot be written, and is not remembered" in caplog.text


def test_a_rank_notes_what_its_plan_says(machine: Path) -> None:
    """On the CPU, where the form is named."""
    settings = {"host_memory": "1MiB", "host_form": "lossless"}
    worker = build_worker(Config.from_mapping(settings), identity=CacheIdentity("noisy", "bf16", "NHD", 16))
    worker.register_kv_caches({"layers.0": torch.zeros(BLOCKS, 4096, dtype=torch.bfloat16)}, BLOCKS)
    worker.bind_connector_metadata(StepPlan(1))
    assert not machine.exists()
    worker.bind_connector_metadata(StepPlan(2, unfit=True))
    assert len(list(machine.iterdir())) == 1
    worker.shutdown()
