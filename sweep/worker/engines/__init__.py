"""How a model is trained: the part that differs between the engines, behind one interface."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from sweep.spec import CellSpec, EngineName, Precision
from sweep.worker.optimizers import Given

Batch = Any
"""A mapping of keyword arguments to the model, or a tuple of its positional ones; tensors on the device."""


class Engine(Protocol):
    """One micro-batch is `with micro_batch(): forward, backward, step`; `step` acts on the last of an iteration."""

    def load(self, build: Callable[[torch.dtype], nn.Module]) -> None:
        """Build the model in the dtype, on the device and in the context that this engine wants."""

    def prepare(self, given: Given = None) -> None:
        """Wrap or shard the model, with the optimizer that is given or one made from the spec."""

    def micro_batch(self) -> AbstractContextManager[None]: ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss, a scalar on the device."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None: ...

    model: nn.Module
    """Itself, without what the engine wraps it in; what `load` built may be replaced before `prepare`."""
    optimizer: torch.optim.Optimizer
    """The one that holds the states."""

    @property
    def optimizer_steps(self) -> int:
        """Steps that really happened: dynamic loss scaling may have skipped some."""

    @property
    def parameter_count(self) -> int:
        """Of the whole model, however it is sharded."""


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model's forward gives: a scalar, an output with `loss`, or the first item of a tuple."""
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        loss = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(f"the forward pass of {type(model).__name__} gave {type(output).__name__}, which holds no loss")
    return loss


def stored_dtype(spec: CellSpec) -> torch.dtype:
    """Of the parameters as they are built: fp32 where mixed precision trains them, the half type where it is pure.

    Beside adapters everything is frozen: it needs no fp32 copy and is kept in the type that computes, as users of
    adapters load it.
    """
    if spec.precision is Precision.BF16_PURE or (spec.lora and spec.precision is Precision.BF16):
        return torch.bfloat16
    return torch.float16 if spec.lora and spec.precision is Precision.FP16 else torch.float32


def make_engine(spec: CellSpec, device: torch.device) -> Engine:
    """Each engine is imported where it is used: DeepSpeed alone takes seconds."""
    match spec.engine.name:
        case EngineName.DEEPSPEED:
            from sweep.worker.engines.deepspeed import DeepSpeedEngine

            return DeepSpeedEngine(spec, device)
        case EngineName.FSDP2:
            from sweep.worker.engines.fsdp2 import Fsdp2Engine

            return Fsdp2Engine(spec, device)
        case EngineName.DEVICE_MAP:
            from sweep.worker.engines.device_map import DeviceMapEngine

            return DeviceMapEngine(spec, device)
        case EngineName.SINGLE | EngineName.DDP:
            from sweep.worker.engines.accelerated import AcceleratedEngine

            return AcceleratedEngine(spec, device)
