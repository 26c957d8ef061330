"""Optimizers by name, in the variant that Hugging Face's Trainer uses by default."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sweep.spec import CellSpec, Optimizer

LEARNING_RATE = 1e-4
Given = torch.optim.Optimizer | list[dict[str, Any]] | None
"""What a user's own workload brings: an optimizer, parameter groups for the spec's optimizer, or nothing."""


def optimizer_for(spec: CellSpec, model: nn.Module, given: Given) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        return given
    return build_optimizer(spec.optimizer, model.parameters() if given is None else given)


def build_optimizer(
    kind: Optimizer, parameters: Iterable[nn.Parameter] | list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """AdamW is fused: one kernel, no temporaries of the size of the model as the foreach variant has."""
    if kind is Optimizer.ADAMW:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)
