"""What a setting chooses among."""

from __future__ import annotations

from enum import Enum


class WritePolicy(str, Enum):
    """When a block is saved to the host: see `index/policy.py`."""

    ADAPTIVE = "adaptive"
    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PathName(str, Enum):
    """How bytes move between device and host: see `transfer/paths`."""

    AUTO = "auto"
    RUNS = "runs"
    DIRECT = "direct"
    STAGED = "staged"


class HostFormName(str, Enum):
    """How blocks lie in host memory: see `transfer/memory/host_form.py`."""

    RAW = "raw"
    LOSSLESS = "lossless"
    AUTO = "auto"


class LoadChoice(str, Enum):
    """How hits are loaded: see `scheduler/loads/choice.py`."""

    AUTO = "auto"
    SYNC = "sync"
    ASYNC = "async"


class Prefetch(str, Enum):
    """Whether a request waits for what storage has of its prefix."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class Backup(str, Enum):
    """When a block goes from the host to storage: see `scheduler/storage/backups.py`."""

    ON_SAVE = "on_save"
    ON_EVICTION = "on_eviction"
    AT_FINISH = "at_finish"


class PeerRole(str, Enum):
    """What an engine does for others: computes prompts for them, continues what others computed, or both."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"


class PeerRoute(str, Enum):
    """How blocks get from one engine's device to another's."""

    AUTO = "auto"
    DIRECT = "direct"
    STAGED = "staged"


class WireForm(str, Enum):
    """How blocks lie in slots of host memory on their way to other engines: see `peer/carriers/staged/forms.py`."""

    RAW = "raw"
    LOSSLESS = "lossless"


class Protocol(str, Enum):
    """How Mooncake moves bytes between machines."""

    TCP = "tcp"
    RDMA = "rdma"
