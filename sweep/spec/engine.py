"""How a model is trained: the engine and the options that each engine has, every one of them the library's own."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sweep.spec.fields import LATER, SpecError, positive


class EngineName(str, Enum):
    SINGLE = "single"
    """One process, one device, nothing wrapped around the model."""
    DDP = "ddp"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"
    DEVICE_MAP = "device_map"
    """One process, the layers spread over several devices that work one after the other."""


OPTIONS: Mapping[EngineName, frozenset[str]] = {
    EngineName.SINGLE: frozenset(),
    EngineName.DDP: frozenset(),
    EngineName.FSDP2: frozenset({"reshard_after_forward", "cpu_offload", "sync_each_micro_batch", "wrap_layers"}),
    EngineName.DEEPSPEED: frozenset(
        {
            "zero_stage",
            "zero_init",
            "optimizer_offload",
            "parameter_offload",
            "memory_efficient_linear",
            "reduce_bucket_size",
            "prefetch_bucket_size",
            "config",
        }
    ),
    EngineName.DEVICE_MAP: frozenset(),
}
"""Of which fields of `EngineSpec` an engine takes notice; in all others null is the only value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """An option that is null has the library's default, or is none of this engine's."""

    name: EngineName
    zero_stage: int | None = None
    zero_init: bool | None = field(default=None, metadata=LATER)
    """Whether the model is built under `deepspeed.zero.Init`, sharded as it is made; null: with stage 3 it is."""
    optimizer_offload: bool | None = field(default=None, metadata=LATER)
    """Optimizer states, and the step, on the host."""
    parameter_offload: bool | None = field(default=None, metadata=LATER)
    """Stage 3: sharded parameters on the host until a layer needs them."""
    memory_efficient_linear: bool | None = field(default=None, metadata=LATER)
    """Stage 3: whether a linear layer's gathered weights are let go between its forward and its backward pass (null:
    they are). DeepSpeed's versions that did so only under `zero.Init` kept them all without it."""
    reduce_bucket_size: int | None = field(default=None, metadata=LATER)
    """Elements that are reduced at once."""
    prefetch_bucket_size: int | None = field(default=None, metadata=LATER)
    """Stage 3: elements that are gathered ahead of the layer that runs."""
    reshard_after_forward: bool | None = field(default=None, metadata=LATER)
    """Whether a layer's gathered parameters are freed between its forward and its backward pass; null: they are."""
    cpu_offload: bool | None = field(default=None, metadata=LATER)
    """Sharded parameters, gradients and optimizer states on the host."""
    sync_each_micro_batch: bool | None = field(default=None, metadata=LATER)
    """Whether every accumulated pass reduces its gradients to shards; otherwise (null) whole gradients stay on each
    device until the last pass."""
    wrap_layers: str | None = field(default=None, metadata=LATER)
    """Class names, with commas between them, of the modules that are sharded each on its own; null: those that the
    model names itself, its transformer layers."""
    config: Mapping[str, Any] | None = field(default=None, metadata=LATER)
    """A user's own `ds_config.json`, as content; what the sweep owns is filled in."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name == "name" or value is None or each.name in OPTIONS[self.name]:
                continue
            if each.name == "zero_stage":
                raise SpecError("engine.zero_stage", value, "only engine=deepspeed has ZeRO stages; leave it null")
            have = ", ".join(name.value for name, options in OPTIONS.items() if each.name in options)
            raise SpecError(f"engine.{each.name}", value, f"only engine={have} has it; leave it null")
        if self.name is EngineName.DEEPSPEED:
            self._check_deepspeed()

    def _check_deepspeed(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise SpecError("engine.zero_stage", self.zero_stage, "choose 0, 1, 2 or 3")
        for name, value, wanted in (
            ("zero_init", self.zero_init, "3"),
            ("memory_efficient_linear", self.memory_efficient_linear, "3"),
            ("parameter_offload", self.parameter_offload, "3"),
            ("prefetch_bucket_size", self.prefetch_bucket_size, "3"),
            ("optimizer_offload", self.optimizer_offload, "1, 2 or 3"),
        ):
            if value and str(self.zero_stage) not in wanted:
                raise SpecError(f"engine.{name}", value, f"it needs engine.zero_stage={wanted}")
        for name in ("reduce_bucket_size", "prefetch_bucket_size"):
            if getattr(self, name) is not None:
                positive(f"engine.{name}", getattr(self, name))

    @property
    def builds_sharded(self) -> bool:
        """Whether no rank ever holds the whole model: `zero.Init`."""
        return self.zero_stage == 3 and self.zero_init is not False

    @property
    def data_parallel(self) -> bool:
        """Whether each device works on a batch of its own."""
        return self.name is not EngineName.DEVICE_MAP

    @property
    def label(self) -> str:
        return self.name.value if self.zero_stage is None else f"ZeRO-{self.zero_stage}"

    @property
    def axes(self) -> dict[str, object]:
        """What was chosen beside the engine's name, by the name under which it is swept."""
        names = [each.name for each in dataclasses.fields(self) if each.name not in ("name", "zero_stage", "config")]
        return {f"engine.{name}": getattr(self, name) for name in names}
