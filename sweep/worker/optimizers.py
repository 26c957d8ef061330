"""Optimizers by name, in the variant that Hugging Face's Trainer uses by default."""

from collections.abc import Iterable

import torch
from torch import nn

from sweep.spec import Optimizer

LEARNING_RATE = 1e-4


def build_optimizer(kind: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW is fused: one kernel, no temporaries of the size of the model as the foreach variant has."""
    if kind is Optimizer.ADAMW:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)
