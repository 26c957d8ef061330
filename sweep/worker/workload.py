"""What a rank trains and on what: the model of the spec on random tokens or a text, or whatever a user's code makes."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from sweep.spec import CellSpec, Precision, WorkloadName
from sweep.worker.engines import Batch
from sweep.worker.failure import NotInEffectError
from sweep.worker.model import build_model, import_architecture
from sweep.worker.optimizers import Given
from sweep.worker.random_tokens import RandomBatches
from sweep.worker.savers import apply_savers, asked_for, enable_checkpointing
from sweep.worker.text import TextBatches


class WorkloadError(RuntimeError):
    """A user's own workload does not keep to what was agreed; one sentence."""


class Batches(Protocol):
    @property
    def tokens(self) -> int | None:
        """That were handed out so far, without padding; None where nobody can say."""

    def next(self) -> Batch:
        """The next micro-batch, on the device."""


class Workload(Protocol):
    given: Given
    """The user's own optimizer; known once the model is built."""

    def build(self, dtype: torch.dtype) -> nn.Module: ...

    def adapt(self, model: nn.Module) -> nn.Module:
        """With the spec's memory savers, outside of the context in which the engine had the model built."""

    def batches(self) -> Batches: ...


def make_workload(spec: CellSpec, rank: int, device: torch.device) -> Workload:
    if spec.workload.name is WorkloadName.OWN:
        return OwnWorkload(spec, rank, device)
    return SpecWorkload(spec, rank, device)


def import_workload(spec: CellSpec) -> None:
    """Everything that is imported only for this cell, before loading is measured."""
    if spec.workload.name is WorkloadName.OWN:
        function_of(spec)
        importlib.import_module("torch._dynamo")  # which the first optimizer imports, and transformers' models
    if spec.model.parameters is not None:
        import_architecture(spec)


class SpecWorkload:
    given: Given = None

    def __init__(self, spec: CellSpec, rank: int, device: torch.device) -> None:
        self._spec, self._rank, self._device = spec, rank, device

    def build(self, dtype: torch.dtype) -> nn.Module:
        return build_model(self._spec, dtype)

    def adapt(self, model: nn.Module) -> nn.Module:
        return apply_savers(self._spec, model)

    def batches(self) -> Batches:
        kind = TextBatches if self._spec.workload.name is WorkloadName.TEXT else RandomBatches
        return kind(self._spec, self._rank, self._device)


class OwnWorkload:
    """`build(batch_size, seq_len, ...)` gives model, optimizer and batches; it gets what it has parameters for."""

    given: Given = None

    def __init__(self, spec: CellSpec, rank: int, device: torch.device) -> None:
        self._spec, self._rank, self._device = spec, rank, device

    def build(self, dtype: torch.dtype) -> nn.Module:
        spec = self._spec
        function = function_of(spec)
        offered: dict[str, Callable[[], Any]] = {
            "batch_size": lambda: spec.batch_size,
            "seq_len": lambda: spec.seq_len,
            "rank": lambda: self._rank,
            "world_size": lambda: spec.world_size,
            "seed": lambda: spec.seed,
            "dtype": lambda: dtype,
            "gradient_checkpointing": lambda: spec.gradient_checkpointing,
            "model": lambda: apply_savers(spec, build_model(spec, dtype)),
        }
        parameters = inspect.signature(function).parameters
        passed = {name: value() for name, value in offered.items() if name in parameters} | dict(
            spec.workload.arguments
        )
        answer = function(**passed)
        if not (isinstance(answer, tuple) and len(answer) == 3 and isinstance(answer[0], nn.Module)):
            raise WorkloadError(
                f"{spec.workload.target} gave {type(answer).__name__}: it must return a torch.nn.Module, an optimizer "
                "(or parameter groups, or None), and an iterable of batches"
            )
        model: nn.Module = answer[0]
        given, self._iterable = answer[1:]
        self.given = given if given is None or isinstance(given, torch.optim.Optimizer) else list(given)
        if not {"gradient_checkpointing", "model"} & set(parameters) and spec.gradient_checkpointing:
            self._checkpoint(model)
        if "dtype" not in parameters and spec.precision is Precision.BF16_PURE:
            model = model.to(dtype)
        return model.train()

    def _checkpoint(self, model: nn.Module) -> None:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise NotInEffectError(
                f"gradient_checkpointing=true is not in effect: {self._spec.workload.target} has no parameter "
                f"gradient_checkpointing, and its {type(model).__name__} no method gradient_checkpointing_enable"
            )
        enable_checkpointing(model, reentrant=self._spec.checkpoint_reentrant, every=self._spec.checkpoint_every)

    def adapt(self, model: nn.Module) -> nn.Module:
        """The user's model as it is; what the spec asks for beside is in effect where it was built from the spec's."""
        names = asked_for(self._spec)
        if names and "model" not in inspect.signature(function_of(self._spec)).parameters:
            raise NotInEffectError(f"{names[0]} is not in effect: {self._spec.workload.target} has no parameter model")
        return model

    def batches(self) -> Batches:
        return OwnBatches(self._spec, self._iterable, self._device)


class OwnBatches:
    """The user's batches one after the other, from the start again when they are used up."""

    def __init__(self, spec: CellSpec, iterable: Any, device: torch.device) -> None:
        self._spec, self._iterable, self._device = spec, iterable, device
        self._iterator: Iterator[Any] = iter(iterable)
        self.tokens: int | None = 0

    def next(self) -> Batch:
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = iter(self._iterable)
            batch = next(self._iterator, None)
        if batch is None:
            raise WorkloadError(f"{self._spec.workload.target} gave no more batches: return a list or a DataLoader")
        sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
        if self._spec.batch_size not in sizes:
            found = " and ".join(map(str, sorted(sizes))) or "no"
            raise NotInEffectError(
                f"batch_size={self._spec.batch_size} is not in effect: a batch of {self._spec.workload.target} holds "
                f"{found} samples"
            )
        self._count(batch)
        moved = moved_to(batch, self._device)
        if isinstance(moved, list):  # as a DataLoader gives the tensors of a TensorDataset
            return tuple(moved)
        return moved if isinstance(moved, Mapping | tuple) else (moved,)

    def _count(self, batch: Any) -> None:
        tokens = None
        if isinstance(batch, Mapping):
            mask, ids = batch.get("attention_mask"), batch.get("input_ids")
            tokens = int(mask.sum()) if mask is not None else ids.numel() if ids is not None else None
        self.tokens = None if tokens is None or self.tokens is None else self.tokens + tokens


def function_of(spec: CellSpec) -> Callable[..., Any]:
    assert spec.workload.target is not None
    module, _, name = spec.workload.target.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def moved_to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved_to(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved_to(item, device) for item in value)
    return value
