"""Optimizers by name, each as its own library makes it."""

from typing import Any

import torch
from torch import nn

from sweep.spec import CellSpec, Optimizer
from sweep.worker.failure import NotInEffectError

LEARNING_RATE = 1e-4
Given = torch.optim.Optimizer | list[dict[str, Any]] | None
"""What a user's own workload brings: an optimizer, parameter groups for the spec's optimizer, or nothing."""


def optimizer_for(spec: CellSpec, model: nn.Module, given: Given) -> torch.optim.Optimizer:
    """Over what is trained; frozen parameters never meet it."""
    if isinstance(given, torch.optim.Optimizer):
        return given
    return build_optimizer(
        spec.optimizer, [p for p in model.parameters() if p.requires_grad] if given is None else given
    )


def build_optimizer(kind: Optimizer, parameters: list[nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
    match kind:
        case Optimizer.ADAMW:
            return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
        case Optimizer.ADAMW_FOREACH:
            return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=True)
        case Optimizer.ADAMW_SINGLE:
            return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=False)
        case Optimizer.SGD:
            return torch.optim.SGD(parameters, lr=LEARNING_RATE)
        case Optimizer.DEEPSPEED_FUSED_ADAM | Optimizer.DEEPSPEED_CPU_ADAM:
            return _of_deepspeed(kind, parameters)
    return _of_another_library(kind, parameters)


def _of_another_library(kind: Optimizer, parameters: Any) -> torch.optim.Optimizer:
    """Imported where they are used: each brings a library that the others do not need."""
    made: torch.optim.Optimizer
    if kind is Optimizer.ADAFACTOR:
        from transformers.optimization import Adafactor

        made = Adafactor(parameters, lr=LEARNING_RATE, scale_parameter=False, relative_step=False)
    else:
        from bitsandbytes.optim import AdamW8bit

        made = AdamW8bit(parameters, lr=LEARNING_RATE)
    return made


def _of_deepspeed(kind: Optimizer, parameters: Any) -> torch.optim.Optimizer:
    """Compiled when they are first used. Raises `NotInEffectError` where that cannot be done."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    make = FusedAdam if kind is Optimizer.DEEPSPEED_FUSED_ADAM else DeepSpeedCPUAdam
    try:
        made: torch.optim.Optimizer = make(parameters, lr=LEARNING_RATE)
    except Exception as error:
        words = (str(error).splitlines() or [type(error).__name__])[0].partition(": [")[0]
        raise NotInEffectError(f"optimizer={kind.value} cannot be built here: {words}") from error
    return made
