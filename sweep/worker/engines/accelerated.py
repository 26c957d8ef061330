"""One device, or DistributedDataParallel, through accelerate: the loop of Hugging Face's Trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn

from sweep.spec import CellSpec, DeviceKind, Precision
from sweep.worker.engines import Batch, loss_of, stored_dtype
from sweep.worker.optimizers import Given, optimizer_for


class AcceleratedEngine:
    def __init__(self, spec: CellSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        mixed = spec.precision.value if spec.precision in (Precision.BF16, Precision.FP16) else "no"
        self._accelerator = Accelerator(
            mixed_precision=mixed,
            gradient_accumulation_steps=spec.accumulation,
            cpu=spec.device.kind is DeviceKind.CPU,
        )
        self._steps = 0

    def load(self, build: Callable[[torch.dtype], nn.Module]) -> None:
        with self._device:
            self.model = build(stored_dtype(self._spec))

    def prepare(self, given: Given = None) -> None:
        self.optimizer = optimizer_for(self._spec, self.model, given)
        self._model, self._optimizer = self._accelerator.prepare(self.model, self.optimizer)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        with self._accelerator.accumulate(self._model):
            yield

    def forward(self, batch: Batch) -> torch.Tensor:
        return loss_of(self._model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)

    def step(self) -> None:
        last = self._accelerator.sync_gradients
        if last and self._spec.gradient_clipping is not None:
            self._accelerator.clip_grad_norm_(self._model.parameters(), self._spec.gradient_clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if last and not self._accelerator.optimizer_step_was_skipped:
            self._steps += 1

    @property
    def optimizer_steps(self) -> int:
        return self._steps

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())
