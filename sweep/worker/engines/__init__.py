"""How a model is trained: the part that differs between DDP and DeepSpeed, behind one interface."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from sweep.spec import CellSpec, EngineName

Batch = dict[str, torch.Tensor]


class Engine(Protocol):
    """One micro-batch is `with micro_batch(): forward, backward, step`; `step` acts on the last of an iteration."""

    def load(self, build: Callable[[torch.dtype], nn.Module]) -> None:
        """Build the model in the dtype, on the device and in the context that this engine wants."""

    def prepare(self) -> None:
        """Wrap or shard the model and make the optimizer."""

    def micro_batch(self) -> AbstractContextManager[None]: ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss, a scalar on the device."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None: ...

    @property
    def model(self) -> nn.Module:
        """The model itself, without what the engine wraps it in."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that holds the states."""

    @property
    def optimizer_steps(self) -> int:
        """Steps that really happened: dynamic loss scaling may have skipped some."""

    @property
    def parameter_count(self) -> int:
        """Of the whole model, however it is sharded."""


def make_engine(spec: CellSpec, device: torch.device) -> Engine:
    if spec.engine.name is EngineName.DEEPSPEED:
        from sweep.worker.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(spec, device)
    from sweep.worker.engines.ddp import DdpEngine

    return DdpEngine(spec, device)
