"""The model of a cell: an architecture with random weights, or with pretrained ones where they are asked for.

Only the architecture matters for memory and speed.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from sweep.spec import CellSpec, ModelSpec, Task, Weights

AUTO_CLASSES = {
    Task.CAUSAL_LM: AutoModelForCausalLM,
    Task.SEQUENCE_CLASSIFICATION: AutoModelForSequenceClassification,
}


def configuration_of(model: ModelSpec) -> Any:
    """The configuration object of transformers."""
    extra: dict[str, Any] = {"use_cache": False}
    if model.task is Task.SEQUENCE_CLASSIFICATION:
        extra |= {"num_labels": 2, "pad_token_id": 0}
    values = extra | dict(model.config)
    if model.remote_code:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=True, **values)
    return AutoConfig.for_model(model.model_type, **values)


def vocabulary_of(model: ModelSpec) -> int:
    return int(configuration_of(model).get_text_config().vocab_size)


def build_from(config: Any, model: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """With random parameters of `dtype`, on the default device."""
    code = {"trust_remote_code": True} if model.remote_code else {}
    built: nn.Module = AUTO_CLASSES[model.task].from_config(config, dtype=dtype, **code)
    return built


def build_model(spec: CellSpec, dtype: torch.dtype) -> nn.Module:
    """The model in training mode, with parameters of `dtype` on the default device."""
    config = configuration_of(spec.model)
    if spec.model.weights is Weights.PRETRAINED:
        model = load_pretrained(config, spec.model, dtype)
    else:
        model = build_from(config, spec.model, dtype)
    return model.train()


def load_pretrained(config: Any, model: ModelSpec, dtype: torch.dtype) -> nn.Module:
    loaded: nn.Module = AUTO_CLASSES[model.task].from_pretrained(
        model.path, config=config, dtype=dtype, trust_remote_code=model.remote_code
    )
    return loaded.to(torch.get_default_device())


def import_architecture(spec: CellSpec) -> None:
    """Build the model on the meta device, which takes no memory, so that every import is behind us.

    Otherwise imports would be counted as loading on the CPU device, and would run while `zero.Init` has patched torch.
    """
    with torch.device("meta"):
        model = build_from(configuration_of(spec.model), spec.model, torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != spec.model.parameters:
        raise ValueError(f"model={spec.model.name} has {count} parameters, not {spec.model.parameters}")
