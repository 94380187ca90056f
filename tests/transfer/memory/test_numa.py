"""The GPU's NUMA node from made-up sysfs trees; no GPU needed.

FastDeploy's row "NUMA": a physical index that ignores CUDA_VISIBLE_DEVICES, the first NVIDIA device as fallback, and a
binding that persists on the thread.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kv_connector.transfer.memory import numa

CARDS = {"0000:1b:00.0": (0x0000, 0x1B, 0), "0001:c4:1f.0": (0x0001, 0xC4, 0x1F)}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two cards, on nodes 0 and 1."""
    for node, address in enumerate(CARDS):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cpus in enumerate(["0-3,8-11\n", "4-7,12-15\n"]):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    return tmp_path


def make_visible(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """What CUDA_VISIBLE_DEVICES does: torch numbers the visible cards from 0."""

    def properties(device: torch.device) -> SimpleNamespace:
        domain, bus, slot = CARDS[addresses[device.index or 0]]
        return SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=slot)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_each_gpu_has_its_node(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_visible(monkeypatch, *CARDS)
    assert [numa.pci_address(torch.device("cuda", i)) for i in (0, 1)] == list(CARDS)
    assert [numa.gpu_node(torch.device("cuda", i), sysfs) for i in (0, 1)] == [0, 1]


def test_the_visible_gpu_counts_not_the_first(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_visible(monkeypatch, "0001:c4:1f.0")
    node = numa.gpu_node(torch.device("cuda", 0), sysfs)
    assert node == 1
    assert numa.node_cpus(node, sysfs) == {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize("text", ["-1\n", "", "none"])
def test_a_machine_that_does_not_say(text: str, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_visible(monkeypatch, *CARDS)
    (sysfs / "bus/pci/devices/0000:1b:00.0/numa_node").write_text(text)
    assert numa.gpu_node(torch.device("cuda", 0), sysfs) is None
    assert numa.gpu_node(torch.device("cuda", 0), sysfs / "elsewhere") is None
    assert numa.node_cpus(9, sysfs) == frozenset()


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", {0}), ("0-2", {0, 1, 2}), ("0-1,4,6-7\n", {0, 1, 4, 6, 7}), ("\n", set())]
)
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert numa.parse_cpu_list(text) == cpus


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
def test_binding_holds_for_the_calling_thread_only() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset([min(before)])
    seen = []

    def bind() -> None:
        seen.append((numa.bind_thread(one), os.sched_getaffinity(0)))
        seen.append((numa.bind_thread(frozenset([10**6])), os.sched_getaffinity(0)))

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    assert seen == [(True, set(one)), (False, set(one))]
    assert os.sched_getaffinity(0) == before


@pytest.mark.gpu
def test_the_address_of_a_real_gpu() -> None:
    address = numa.pci_address(torch.device("cuda", 0))
    assert (numa.SYSFS / "bus/pci/devices" / address).exists()
