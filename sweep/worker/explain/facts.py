"""What the rules of the findings need beyond the bytes at the peak."""

from typing import Any

import torch
from torch import nn

from sweep.explanation import Facts
from sweep.record import RankRecord
from sweep.worker.engines import Engine
from sweep.worker.explain.recorder import Recorder


def facts_of(engine: Engine, record: RankRecord, recorder: Recorder) -> Facts:
    frozen = frozen_states(engine.optimizer)
    head, tied = _output_embedding(engine.model)
    return Facts(
        frozen_state_bytes=sum(bytes_ for _, bytes_ in frozen),
        frozen_state_parameters=sum(count for count, _ in frozen),
        kv_cache_bytes=recorder.kv_cache_bytes,
        output_embedding_parameters=head,
        embeddings_tied=tied,
        # Of Adam's multi-tensor variant; the fused one is a single kernel, and SGD's needs no temporaries.
        foreach=any(step.name.startswith("_foreach_sqrt") for step in recorder.steps),
        layer_forwards=record.in_effect.layer_forwards if record.in_effect else None,
    )


def frozen_states(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Elements, and bytes of state, of each parameter that has optimizer state and is not trained."""
    found = []
    for parameter, state in optimizer.state.items():
        if not parameter.requires_grad and not _is_partition(parameter):
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            found.append((parameter.numel(), sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
    return found


def _is_partition(parameter: torch.Tensor) -> bool:
    """DeepSpeed's flat partitions are no parameters of the model, and need no gradient of autograd's."""
    return not isinstance(parameter, nn.Parameter) or not parameter.is_leaf


def _output_embedding(model: nn.Module) -> tuple[int | None, bool | None]:
    embedding: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if embedding is None:
        return None, None
    source: Any = getattr(model, "get_input_embeddings", lambda: None)()
    weight = embedding.weight
    return int(getattr(weight, "ds_numel", weight.numel())), source is not None and source.weight is weight
