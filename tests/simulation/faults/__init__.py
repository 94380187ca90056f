"""The faults that `tests.simulation.mutants` puts back, by the part of the code that they are in.

Most of them were in the code once, or a test suite did not notice them. A fault that is mended is added here, with
whatever notices it.
"""

from .control import CONTROL
from .groups import GROUPS
from .identity import IDENTITY
from .layer_groups import LAYER_GROUPS
from .loads import LOADS
from .macs import MACS
from .mutant import Mutant
from .operators import OPERATORS
from .peer_groups import PEER_GROUPS
from .peers import PEERS
from .refusals import REFUSALS
from .replicas import REPLICAS
from .reuse import REUSE
from .saves import SAVES
from .scheduler import SCHEDULER
from .sglang import SGLANG
from .storage import STORAGE
from .storage_groups import STORAGE_GROUPS
from .tensorrt_llm import TENSORRT_LLM
from .tp_sizes import TP_SIZES
from .transfer import TRANSFER
from .vllm import VLLM
from .wire_forms import WIRE_FORMS
from .worker import WORKER

MUTANTS: tuple[Mutant, ...] = (
    *SCHEDULER,
    *LOADS,
    *SAVES,
    *CONTROL,
    *REFUSALS,
    *WORKER,
    *REPLICAS,
    *PEERS,
    *PEER_GROUPS,
    *TP_SIZES,
    *WIRE_FORMS,
    *STORAGE,
    *MACS,
    *GROUPS,
    *STORAGE_GROUPS,
    *LAYER_GROUPS,
    *REUSE,
    *IDENTITY,
    *TRANSFER,
    *VLLM,
    *SGLANG,
    *TENSORRT_LLM,
    *OPERATORS,
)
