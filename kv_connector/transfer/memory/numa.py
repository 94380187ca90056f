"""The NUMA node of a GPU, from sysfs, and its CPUs.

The PCI address is the one that torch reports for its device index, so that CUDA_VISIBLE_DEVICES and any other
renumbering are honoured.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ...machine import read_text

SYSFS = Path("/sys")


def pci_address(device: torch.device) -> str:
    """PCI address of a CUDA device as sysfs spells it, such as "0000:1b:00.0"."""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def gpu_node(device: torch.device, sysfs: Path = SYSFS) -> int | None:
    """NUMA node of a CUDA device; None where the machine does not say (one node, or a virtual machine)."""
    text = read_text(sysfs / "bus/pci/devices" / pci_address(device) / "numa_node")
    try:
        node = int(text)
    except ValueError:
        return None
    return node if node >= 0 else None


def node_cpus(node: int, sysfs: Path = SYSFS) -> frozenset[int]:
    """CPUs of a NUMA node; empty where the machine does not say."""
    return parse_cpu_list(read_text(sysfs / f"devices/system/node/node{node}/cpulist"))


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPU numbers from the kernel's list form: "0-3,8" is {0, 1, 2, 3, 8}. Raises ValueError on anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def bind_thread(cpus: frozenset[int]) -> bool:
    """Run the calling thread on these CPUs only, so that memory it touches first lies on their node.

    Other threads stay as they are. False, and no change, where none of the CPUs is open to this process.
    """
    allowed = cpus & os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset[int]()
    if not allowed:
        return False
    os.sched_setaffinity(0, allowed)  # 0 is the calling thread, not the process
    return True
