"""The GPU: driver, compute capability, link and NUMA node."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from .finding import Finding, ok, problem, warning

if TYPE_CHECKING:
    import torch

_LANE_GIGABYTES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""A second, of a lane of each generation of PCIe, one direction, before headers of packets."""
_LEAST_CAPABILITY = (8, 0)
"""Of GPUs that kernels were tested on, or their like."""
_QUERY = "pcie.link.gen.max,pcie.link.gen.gpumax,pcie.link.gen.current,pcie.link.width.max,pcie.link.width.current"
_TRIED_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Link:
    """PCIe as it is: `generation` is what GPU and slot have in common, also while it sleeps at a lower one."""

    generation: int
    width: int
    most_width: int

    @property
    def gigabytes_per_second(self) -> float:
        """What it can carry in one direction."""
        return _LANE_GIGABYTES.get(self.generation, 0.0) * self.width


@dataclass(slots=True)
class FoundGpu:
    """`device` is None without a GPU that torch can use."""

    device: torch.device | None = None
    link: Link | None = None
    findings: list[Finding] = field(default_factory=list)


def look(number: int) -> FoundGpu:
    """Of the GPU of this number, as torch counts them."""
    import torch

    count = torch.cuda.device_count()
    findings = [] if count else [_without(torch.version.cuda)]
    if number >= max(1, count):  # the first one is the default, which nobody has asked for
        limit = f"below {count}, as torch sees that many" if count else "left out, as torch sees none"
        findings.append(problem("GPU", f"--device {number}", limit, "give another, or CUDA_VISIBLE_DEVICES"))
    if findings:
        return FoundGpu(findings=findings)
    device = torch.device("cuda", number)
    link = link_of(device)
    return FoundGpu(device, link, [*_itself(device), _link(link), *numa_findings(device)])


def _without(cuda: str | None) -> Finding:
    has_one = bool(list(Path("/dev").glob("nvidia[0-9]*")))
    if has_one and cuda is None:
        fix = "pip install torch from an index of CUDA builds: pytorch.org/get-started"
        return problem("GPU", "there is one, but this torch is built for the CPU", "torch with CUDA", fix)
    if has_one:
        fix = "see nvidia-smi: the driver may be too old for this torch, or the container has no access"
        return problem("GPU", f"there is one, but torch (CUDA {cuda}) cannot use it", "torch.cuda works", fix)
    fix = "none on a machine without; else give the container its GPUs (docker run --gpus all)"
    return warning("GPU", "none: copies run with torch on the CPU", "a GPU, for anything but trying it out", fix)


def _itself(device: torch.device) -> Iterator[Finding]:
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    value = f"{properties.name}, {memory}, compute capability {capability[0]}.{capability[1]}"
    limit = "compute capability {}.{} or newer".format(*_LEAST_CAPABILITY)
    if capability >= _LEAST_CAPABILITY:
        yield ok("GPU", value, limit)
    else:
        yield warning("GPU", value, limit, 'nobody has tested older ones: set copy_path "runs", which needs no kernel')
    driver = driver_version()
    yield ok("driver", f"{driver}, torch {torch.__version__} for CUDA {torch.version.cuda}")


def driver_version() -> str:
    """As the kernel module says it; "unknown" where it does not."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def link_of(device: torch.device) -> Link | None:
    """By NVML, or nvidia-smi; None where neither is there."""
    from ...transfer.memory.numa import pci_address

    address = pci_address(device)
    try:
        return _by_nvml(address)
    except ImportError:
        return _by_nvidia_smi(address)


def _by_nvml(address: str) -> Link | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        gpu = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
        return Link(
            pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
            pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
            pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _by_nvidia_smi(address: str) -> Link | None:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", f"--id={address}"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        most, _, _, most_width, width = map(int, text.split(","))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Link(most, width, most_width)


def _link(link: Link | None) -> Finding:
    if link is None:
        fix = "pip install nvidia-ml-py, or install nvidia-smi; virtual machines may hide it"
        return warning("link", "neither NVML nor nvidia-smi tells of it", "its generation and width", fix)
    value = f"PCIe {link.generation}.0 x{link.width}, {link.gigabytes_per_second:.1f} GB/s in each direction"
    if link.width < link.most_width:
        fix = "seat the card anew, or use a slot with all lanes; a riser or a switch may take some"
        return problem("link", value, f"x{link.most_width}, as GPU and slot could", fix)
    return ok("link", value)


def numa_findings(device: torch.device) -> Iterator[Finding]:
    """Where the GPU hangs, and whether memory that we touch lies there."""
    from ...transfer.memory import numa

    node = numa.gpu_node(device)
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if node is None:
        told = "one node" if len(nodes) <= 1 else "the machine does not say"
        yield ok("NUMA node of the GPU", f"{told}: nothing is bound")
        return
    cpus = numa.node_cpus(node)
    name = f"memory on NUMA node {node}, the GPU's"
    fix = "start the engine with that node's CPUs and memory allowed (numactl, docker --cpuset-cpus, --cpuset-mems)"
    landed = node_of_touched(cpus)
    if landed is None:
        yield warning(name, "none of the node's CPUs is open to this process", "some of them are", fix)
    elif landed != node and landed >= 0:
        yield warning(name, f"what a thread there touches lies on node {landed}", f"node {node}", fix)
    else:
        yield ok(
            name, "a bound thread's memory lies there" if landed == node else "bound; the kernel does not say where"
        )


def node_of_touched(cpus: frozenset[int]) -> int | None:
    """The NUMA node that memory lies on which a thread bound to these CPUs has touched; -1 where the kernel does not
    say, None where the thread cannot be bound."""
    found: list[int | None] = []
    thread = Thread(target=lambda: found.append(_touch(cpus)))
    thread.start()
    thread.join()
    return found[0]


def _touch(cpus: frozenset[int]) -> int | None:
    import torch

    from ...transfer.memory import numa

    if not numa.bind_thread(cpus):
        return None
    memory = torch.empty(_TRIED_BYTES, dtype=torch.uint8).fill_(1)
    address = memory.data_ptr()
    counts: dict[int, int] = {}
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:
        return -1
    # The mapping that holds the address is the last that begins at it or in front of it.
    below = [line for line in lines if int(line.split()[0], 16) <= address]
    for word in max(below, key=lambda line: int(line.split()[0], 16)).split() if below else ():
        if word.startswith("N") and "=" in word:
            node, _, pages = word[1:].partition("=")
            counts[int(node)] = int(pages)
    return max(counts, key=lambda node: counts[node]) if counts else -1
