"""What one cell is: `CellSpec`, frozen and validated, and its identities.

A spec is the whole truth about a cell: the launcher writes it as JSON and the training process reads nothing else.
`cell_id` identifies a cell together with the environment that decides its result, `series_id` the cells that
differ in batch size alone. Sizes are in bytes, durations in seconds, lengths in tokens.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sweep.spec.engine import EngineSpec
from sweep.spec.fields import LATER, SpecError, identity_of, positive
from sweep.spec.model import ModelSpec
from sweep.spec.savers import Attention, LoraSpec, Loss
from sweep.spec.workload import WorkloadSpec

SCHEMA_VERSION = 1  # 1: first


class DeviceKind(str, Enum):
    CUDA = "cuda"
    VIRTUAL = "virtual"
    CPU = "cpu"


class SizeAxis(str, Enum):
    """What grows along a series; the name of the field."""

    BATCH_SIZE = "batch_size"
    SEQ_LEN = "seq_len"


class Precision(str, Enum):
    """`bf16` and `fp16` are mixed precision with fp32 master weights; `bf16_pure` keeps everything in bf16."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    BF16_PURE = "bf16_pure"


class Optimizer(str, Enum):
    ADAMW = "adamw"
    """torch's, fused: one kernel, no temporaries of the size of the model."""
    ADAMW_FOREACH = "adamw_foreach"
    ADAMW_SINGLE = "adamw_single"
    """torch's, one tensor after the other."""
    SGD = "sgd"
    """Without momentum: no states."""
    ADAFACTOR = "adafactor"
    """transformers', as its Trainer sets it: no first moment, the second one by rows and columns."""
    ADAMW_8BIT = "adamw_8bit"
    """bitsandbytes'."""
    DEEPSPEED_FUSED_ADAM = "deepspeed_fused_adam"
    DEEPSPEED_CPU_ADAM = "deepspeed_cpu_adam"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """The virtual GPU: a profile's key, and what is changed in it."""

    key: str
    total_memory_bytes: int | None = None
    other_processes_bytes: int = 0

    def __post_init__(self) -> None:
        if self.total_memory_bytes is not None:
            positive("gpu.total_memory_bytes", self.total_memory_bytes)
        if self.other_processes_bytes < 0:
            raise SpecError(
                "gpu.other_processes_bytes", self.other_processes_bytes, "give a number of bytes, 0 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    kind: DeviceKind
    gpu: GpuSpec | None = None
    """Which GPU the virtual device plays."""
    memory_limit_bytes: int | None = None
    """CPU only: the address space that a rank may take on top of what it holds once its libraries are imported."""

    def __post_init__(self) -> None:
        if (self.gpu is not None) != (self.kind is DeviceKind.VIRTUAL):
            raise SpecError("device.gpu", self.gpu and self.gpu.key, "device=virtual plays a GPU, and no other device")
        if self.kind is DeviceKind.CPU:
            positive("device.memory_limit_bytes", self.memory_limit_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSpec:
    model: ModelSpec
    engine: EngineSpec
    device: DeviceSpec
    world_size: int
    batch_size: int
    """Sequences per device per forward pass (the micro-batch)."""
    seq_len: int
    gradient_checkpointing: bool = False
    checkpoint_reentrant: bool = field(default=False, metadata=LATER)
    """Recompute in a backward pass within the backward pass, PyTorch's older way."""
    checkpoint_every: int = field(default=1, metadata=LATER)
    """Of so many layers one is recomputed."""
    expandable_segments: bool = False
    precision: Precision = Precision.BF16
    accumulation: int = 1
    """Forward passes per optimizer step."""
    optimizer: Optimizer = Optimizer.ADAMW
    gradient_clipping: float | None = 1.0
    lora: LoraSpec | None = field(default=None, metadata=LATER)
    liger: bool = field(default=False, metadata=LATER)
    """Liger's kernels for norms, rotary embeddings and MLPs; its loss is `loss`."""
    attention: Attention | None = field(default=None, metadata=LATER)
    """Null: what transformers chooses for the model."""
    loss: Loss = field(default=Loss.FULL, metadata=LATER)
    compile: bool = field(default=False, metadata=LATER)
    """`torch.compile` with its defaults."""
    warmup_iterations: int = 2
    """Iterations before the measured ones; the optimizer's states exist only after the first."""
    measured_iterations: int = 5
    seed: int = 0
    workload: WorkloadSpec = field(default=WorkloadSpec(), metadata=LATER)
    timeout_seconds: float | None = None
    """None: from the pace of the cells before (`sweep.launch.pace`). No part of a cell's identity."""

    def __post_init__(self) -> None:
        for name in ("world_size", "batch_size", "seq_len", "accumulation", "measured_iterations", "checkpoint_every"):
            positive(name, getattr(self, name))
        if self.warmup_iterations < 1:
            raise SpecError(
                "warmup_iterations",
                self.warmup_iterations,
                "give 1 or more, so that the optimizer has stepped",
            )
        if self.timeout_seconds is not None and not 0 < self.timeout_seconds < math.inf:
            raise SpecError("timeout_seconds", self.timeout_seconds, "give a number of seconds above 0, or null")
        if self.seed < 0:
            raise SpecError("seed", self.seed, "give a whole number of 0 or more")
        if self.gradient_clipping is not None and not 0 < self.gradient_clipping < math.inf:
            raise SpecError("gradient_clipping", self.gradient_clipping, "give a norm above 0, or null for none")
        longest = self.model.context
        if longest is not None and self.seq_len > longest:
            raise SpecError("seq_len", self.seq_len, f"model={self.model.name} takes at most {longest} tokens")

    @property
    def data_parallel_size(self) -> int:
        """Devices that each work on a batch of their own; 1 where they share the layers of one model."""
        return self.world_size if self.engine.data_parallel else 1

    @property
    def processes(self) -> int:
        """Ranks of the cell: one a device, unless one process has them all."""
        return self.data_parallel_size

    @property
    def effective_batch_size(self) -> int:
        return self.batch_size * self.accumulation * self.data_parallel_size

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens that the whole world processes in one optimizer step."""
        return self.effective_batch_size * self.seq_len

    @property
    def series_id(self) -> str:
        """The same for all cells that differ in batch size alone."""
        return self.series_along(SizeAxis.BATCH_SIZE)

    def series_along(self, *axes: SizeAxis) -> str:
        """The same for all cells that differ in these alone."""
        content = _identity(self)
        for axis in axes:
            del content[axis.value]
        return _digest(content)

    @property
    def axes(self) -> dict[str, object]:
        """The values that charts and tables compare, by the name under which they are swept."""
        return {
            "model": self.model.name,
            "engine": self.engine.label,
            "device": self.device.kind.value,
            "gpu": self.device.gpu.key if self.device.gpu else None,
            "world_size": self.world_size,
            "seq_len": self.seq_len,
            "workload": self.workload.label,
            "optimizer": self.optimizer.value,
            "precision": self.precision.value,
            "gradient_checkpointing": self.gradient_checkpointing,
            "expandable_segments": self.expandable_segments,
            "accumulation": self.accumulation,
            "gradient_clipping": self.gradient_clipping,
            **self.engine.axes,
            "checkpoint_reentrant": self.checkpoint_reentrant,
            "checkpoint_every": self.checkpoint_every,
            "lora.rank": self.lora.rank if self.lora else None,
            "lora.targets": ",".join(self.lora.targets) if self.lora else None,
            "liger": self.liger,
            "attention": self.attention.value if self.attention else None,
            "loss": self.loss.value,
            "compile": self.compile,
        }


def cell_id(spec: CellSpec, identity: Mapping[str, object]) -> str:
    """Identity by content: the spec and the environment that decides its result (see `sweep.environment`)."""
    return _digest({"spec": _identity(spec), "identity": dict(identity), "schema": SCHEMA_VERSION})


def _identity(spec: CellSpec) -> Any:
    """What two cells must have in common to be the same: everything but the time they may take."""
    return identity_of(spec) | {"timeout_seconds": 900.0}  # as it was in every cell when the first were stored


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
