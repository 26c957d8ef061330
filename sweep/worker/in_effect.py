"""Whether the configuration does what it says, seen from inside the first iteration. Hooks are gone before measuring.

Checkpointing that is silently off (a model in eval mode, an engine's option that does nothing for this model) shows in
how often a layer runs; precision in the dtypes that really occur.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sweep.record import InEffect
from sweep.spec import CellSpec, EngineName, Optimizer, Precision
from sweep.worker.failure import NotInEffectError
from sweep.worker.savers import checkpointable_layers

HALF = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.BF16_PURE: "bfloat16"}


class Witness:
    """Counts and notes; what it notes is small and holds no tensor."""

    def __init__(self, spec: CellSpec, model: nn.Module) -> None:
        self._spec = spec
        self._model = model
        # Within a layer: hooks of the layer itself may run outside of what is recomputed.
        layer = next(iter(checkpointable_layers(model)), None)
        # Hooks within a compiled model would be compiled into it.
        self._layer = None if layer is None or spec.compile else _first_linear(layer)
        self._forwards = 0
        self._compute: set[str] = set()
        self._gradients: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        if self._layer is not None:
            handles.append(self._layer.register_forward_pre_hook(self._count))
        linear = _first_linear(self._model)
        if linear is not None and not self._spec.compile:
            handles.append(linear.register_forward_hook(self._note_compute))
        if self._spec.engine.name is EngineName.FSDP2:
            # Its sharded gradients are put there, not accumulated: no hook of a parameter sees them.
            handles.append(register_optimizer_step_pre_hook(self._note_sharded_gradients))
        else:
            parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            handles += [self._hook_gradient(parameter) for parameter in {parameters[0], parameters[-1]}]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook_gradient(self, parameter: nn.Parameter) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_hook(self._note_gradient)  # type: ignore[no-untyped-call]
        return handle

    def _count(self, *_: object) -> None:
        self._forwards += 1

    def _note_compute(self, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        self._compute.add(_name(output.dtype))

    def _note_sharded_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = (each.grad for group in optimizer.param_groups for each in group["params"])
        self._gradients.update(_name(gradient.dtype) for gradient in gradients if gradient is not None)

    def _note_gradient(self, gradient: torch.Tensor) -> None:
        self._gradients.add(_name(gradient.dtype))

    def testimony(self, optimizer: torch.optim.Optimizer) -> InEffect:
        """After the optimizer's first step. Raises `NotInEffectError` where it contradicts the spec."""
        seen = InEffect(
            layer_forwards=None if self._layer is None else self._forwards // self._spec.accumulation,
            compute_dtypes=tuple(sorted(self._compute)),
            parameter_dtypes=_names(
                parameter.dtype for parameter in self._model.parameters() if parameter.requires_grad
            ),
            gradient_dtypes=tuple(sorted(self._gradients)),
            optimizer_state_dtypes=_names(
                value.dtype
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            ),
        )
        check(self._spec, seen)
        if self._spec.lora:
            check_adapters(name for name, parameter in self._model.named_parameters() if parameter.requires_grad)
        return seen


def check(spec: CellSpec, seen: InEffect) -> None:
    """Raises `NotInEffectError`, one sentence, where what was seen is not what was asked for."""
    wanted_forwards = 2 if spec.gradient_checkpointing else 1
    if seen.layer_forwards is not None and seen.layer_forwards != wanted_forwards:
        raise NotInEffectError(
            f"gradient_checkpointing={str(spec.gradient_checkpointing).lower()} is not in effect: a layer ran "
            f"{seen.layer_forwards} times in a micro-batch, not {wanted_forwards}"
        )
    half = HALF.get(spec.precision, "float32")
    # DeepSpeed's fp32 copies are the optimizer's; adapters are made in the type of what they are added to.
    keeps_half = spec.precision is Precision.BF16_PURE or spec.engine.name is EngineName.DEEPSPEED
    stored = half if keeps_half else "float32"
    state = half if spec.precision is Precision.BF16_PURE and spec.optimizer is not Optimizer.ADAFACTOR else "float32"
    for what, dtypes, wanted in (
        ("compute", seen.compute_dtypes, half),
        ("parameters", seen.parameter_dtypes, stored),
        ("gradients", seen.gradient_dtypes, stored),
        ("optimizer states", seen.optimizer_state_dtypes, state),
    ):
        if dtypes and dtypes != (wanted,):
            raise NotInEffectError(
                f"precision={spec.precision.value} is not in effect: {what} are {', '.join(dtypes)}, not {wanted}"
            )


def check_adapters(trained: Iterable[str]) -> None:
    """Raises `NotInEffectError` where anything but adapters is trained, or nothing is."""
    names = list(trained)
    others = [name for name in names if "lora_" not in name]
    if others or not names:
        raise NotInEffectError(f"lora is not in effect: {others[0] if others else 'nothing'} is trained")


def check_steps(spec: CellSpec, iterations: int, optimizer_steps: int) -> None:
    """Every iteration of `accumulation` micro-batches is one optimizer step; only fp16 scaling may skip some."""
    if optimizer_steps > iterations or (optimizer_steps < iterations and spec.precision is not Precision.FP16):
        raise NotInEffectError(
            f"accumulation={spec.accumulation} is not in effect: {iterations} iterations made {optimizer_steps} "
            "optimizer steps"
        )


def _first_linear(module: nn.Module) -> nn.Linear | None:
    return next((each for each in module.modules() if isinstance(each, nn.Linear)), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(sorted({_name(dtype) for dtype in dtypes if dtype.is_floating_point}))
