"""What a setting chooses among. Each docstring says what every value means: docs/settings.md is written from them."""

from __future__ import annotations

from enum import Enum


class WritePolicy(str, Enum):
    """When a block is saved to the host: see `index/policy.py`.

    adaptive: when it is computed, unless every block that could be evicted for it is more likely to be asked for again.
    write_through: when it is computed, whatever has to be evicted for it.
    write_through_selective: when later requests have asked for it `write_through_threshold` times.
    write_back: when the device is about to reuse it.
    """

    ADAPTIVE = "adaptive"
    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PathName(str, Enum):
    """How bytes move between device and host: see `transfer/paths`.

    auto: whichever of the others is estimated to be fastest, chosen for each copy.
    runs: DMA of contiguous runs, and strided DMA of layers that are evenly spaced in one allocation.
    direct: a kernel that reads or writes pinned host memory.
    staged: packed by a kernel on the device, then DMA of large rows.
    """

    AUTO = "auto"
    RUNS = "runs"
    DIRECT = "direct"
    STAGED = "staged"


class HostFormName(str, Enum):
    """How blocks lie in host memory: see `transfer/memory/host_form.py`.

    raw: as on the device.
    lossless: bf16 numbers in about three quarters of their bytes, given back bit for bit. A block whose exponents lie
        too far apart is not kept (`refused_blocks`), and hits end in front of it.
    auto: `lossless` on GPUs where blocks become smaller by it and no load slower, else `raw`; the log says why.
    """

    RAW = "raw"
    LOSSLESS = "lossless"
    AUTO = "auto"


class LoadChoice(str, Enum):
    """How hits are loaded: see `scheduler/loads/choice.py`.

    auto: in the request's step, in the background, by joining another request's load of the same prefix, or computed
        instead: whatever is estimated to be fastest.
    sync: every hit in the step that needs it, layer by layer.
    async: every hit in the background: its request waits while others run.
    """

    AUTO = "auto"
    SYNC = "sync"
    ASYNC = "async"


class Prefetch(str, Enum):
    """Whether a request waits for what storage has of its prefix.

    best_effort: it starts with what is on the host already.
    wait_complete: it waits for all that storage has.
    timeout: it waits until `timeout_ms` after it was first seen.
    """

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class Backup(str, Enum):
    """When a block goes from the host to storage: see `scheduler/storage/backups.py`.

    on_save: once it is on the host.
    on_eviction: when it is next to be evicted from there.
    at_finish: when a request that used it has ended.
    """

    ON_SAVE = "on_save"
    ON_EVICTION = "on_eviction"
    AT_FINISH = "at_finish"


class PeerRole(str, Enum):
    """What an engine does for others.

    producer: it computes prompts for them.
    consumer: it continues what others computed.
    both: either.
    """

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"


class PeerRoute(str, Enum):
    """How blocks get from one engine's device to another's.

    auto: `direct` where it can be done, else `staged`.
    direct: from pool to pool; the start is refused where that cannot be done.
    staged: through host memory.
    """

    AUTO = "auto"
    DIRECT = "direct"
    STAGED = "staged"


class WireForm(str, Enum):
    """How blocks lie in slots of host memory on their way to other engines: see `peer/carriers/staged/forms.py`.

    raw: as on the device.
    lossless: bf16 numbers coded in about three quarters of their bytes, exactly, between engines that both set it. It
        is for links that are slower than the coder: any network on a GPU, and slow ones on a CPU.
    """

    RAW = "raw"
    LOSSLESS = "lossless"


class Protocol(str, Enum):
    """How Mooncake moves bytes between machines.

    tcp: over sockets.
    rdma: over the RDMA devices that `devices` names.
    """

    TCP = "tcp"
    RDMA = "rdma"
