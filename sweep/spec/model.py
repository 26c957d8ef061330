"""Which model: a published architecture by its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sweep.spec.fields import LATER, SpecError, positive


class Task(str, Enum):
    CAUSAL_LM = "causal-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"


class Weights(str, Enum):
    RANDOM = "random"
    PRETRAINED = "pretrained"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    name: str
    model_type: str
    """The key under which transformers knows the architecture, such as `llama`."""
    task: Task = Task.CAUSAL_LM
    parameters: int | None = None
    """Number of parameters, tied weights counted once; None where only a user's own code knows the model."""
    config: Mapping[str, Any]
    """Keyword arguments of the architecture's configuration class: the published numbers."""
    path: str | None = field(default=None, metadata=LATER)
    """Hub id or folder, where more than its configuration is taken from there."""
    weights: Weights = field(default=Weights.RANDOM, metadata=LATER)
    remote_code: bool = field(default=False, metadata=LATER)
    """Whether code that comes with the model may run."""
    revision: str | None = field(default=None, metadata=LATER)
    """What identifies the content of `path`."""

    def __post_init__(self) -> None:
        if self.parameters is not None:
            positive("model.parameters", self.parameters)
        if self.path is None and (self.weights is not Weights.RANDOM or self.remote_code):
            raise SpecError("model.path", None, "it is required for pretrained weights and for a model's own code")

    @property
    def context(self) -> int | None:
        """The most tokens that its positions reach, where its configuration says so."""
        longest = self.config.get("max_position_embeddings", self.config.get("n_positions"))
        return longest if isinstance(longest, int) else None
