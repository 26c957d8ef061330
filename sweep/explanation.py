"""What the memory was at the moment of the peak: `Explanation`, written by a rank as `explain<rank>.json`.

The bytes of all categories but the last two add up to `allocated_bytes` of the peak, the
allocator's own figure. Sizes are blocks of the allocator, so that a tensor of 4 bytes counts as 512. Bytes throughout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sweep.record import Phase
from sweep.spec import CellSpec

SCHEMA_VERSION = 1  # 1: first
REQUEST_NAME = "explain.json"
"""Lies beside `spec.json` where a cell is to be explained; it is no part of what the cell is."""


def explanation_name(rank: int) -> str:
    return f"explain{rank}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    snapshot: bool = False
    """Also keep PyTorch's own snapshot, for its memory viewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplanationFailure:
    """Stands in the place of an explanation that did not come about."""

    message: str


class Category(str, Enum):
    """What memory is for; this is the order in which tables and charts show it: what stays comes first."""

    PARAMETERS = "parameters"
    """As they are kept between iterations, a shard where they are sharded; buffers are with them."""
    MASTER_WEIGHTS = "master weights"
    OPTIMIZER_STATES = "optimizer states"
    WORKSPACES = "library workspaces"
    COMMUNICATION = "communication buffers"
    GRADIENTS = "gradients"
    UNSHARDED_GRADIENTS = "unsharded gradients"
    """Of the whole model, on an engine that shards them once it has reduced them."""
    GATHERED_PARAMETERS = "gathered parameters"
    WEIGHT_COPIES = "weight copies"
    """Parameters cast to half precision by autocast, which keeps them until its context ends."""
    ACTIVATIONS = "activations"
    """Made in a forward pass and kept for the backward pass; recomputed ones as well."""
    KV_CACHE = "KV cache"
    LOGITS = "logits and loss"
    """As wide as the vocabulary, forward and backward."""
    TEMPORARIES = "temporaries"
    UNATTRIBUTED = "unattributed"
    SLACK = "allocator slack"
    """Reserved from the device and not allocated."""
    CONTEXT = "context and other processes"
    """Used on the device beyond what PyTorch reserved: the CUDA context, NCCL, whoever else is there."""

    @property
    def allocated(self) -> bool:
        """Whether it is part of the allocator's `allocated_bytes`."""
        return self not in (Category.SLACK, Category.CONTEXT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Blocks of one category that one place in the program made, at the moment of the peak."""

    category: Category
    module: str
    """Path of the module, `*` for the numbers of repeated layers; or the attribute that holds the tensor."""
    made_by: str
    """The operator, with the autograd node in a backward pass; empty where it existed before the iteration."""
    source: str
    """File and line of the innermost frame outside PyTorch; empty where none is known."""
    shape: tuple[int, ...] | None
    """Of the largest block's tensor; None where no tensor is known."""
    dtype: str | None
    count: int
    bytes: int
    released_bytes: int = 0
    """Gathered parameters only: given up by the engine before the peak, and still held by somebody else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStart:
    index: int
    """Position in the iteration's sequence of allocations and frees."""
    phase: Phase
    micro_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Allocated bytes by category over one iteration; a point is the highest moment of its stretch of events."""

    events: int
    """Allocations and frees in the whole iteration."""
    phases: tuple[PhaseStart, ...]
    indices: tuple[int, ...]
    bytes: Mapping[Category, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What rules of thumb need to know beyond bytes at the peak."""

    frozen_state_bytes: int
    """Optimizer states and master weights of parameters that are not trained."""
    frozen_state_parameters: int
    kv_cache_bytes: int
    """Returned by the model's forward pass."""
    output_embedding_parameters: int | None
    """Of the output embedding; None where there is none."""
    embeddings_tied: bool | None
    foreach: bool
    """Whether the optimizer stepped through multi-tensor operators that are not fused."""
    layer_forwards: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    rank: int
    spec: CellSpec
    device_name: str
    capacity_bytes: int
    cell_allocated_peak_bytes: int
    """Of the cell's own forward passes, backward passes and steps, measured before without any recording."""
    cell_highest_phase: Phase
    """Where the cell had its highest figure of all, loading and preparing included."""
    cell_highest_bytes: int
    allocated_bytes: int
    """The allocator's counter: its peak within the explained iteration."""
    reserved_bytes: int
    """At that moment."""
    phase: Phase
    micro_batch: int
    module: str
    """In which the memory was allocated that made the peak; empty outside of modules."""
    categories: Mapping[Category, int]
    places: tuple[Place, ...]
    """Largest first; together as large as their categories."""
    timeline: Timeline
    facts: Facts
    recorded_events: int
    schema_version: int = SCHEMA_VERSION

    @property
    def unattributed_share(self) -> float:
        return self.categories.get(Category.UNATTRIBUTED, 0) / self.allocated_bytes
