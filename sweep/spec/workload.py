"""What a cell trains on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from sweep.spec.fields import SpecError


class WorkloadName(str, Enum):
    SYNTHETIC = "synthetic"
    TEXT = "text"
    OWN = "own"


class Lengths(str, Enum):
    """How the documents of a text become sequences."""

    PACKED = "packed"
    """Joined and cut: every sequence is full."""
    MAXIMUM = "maximum"
    """A document a sequence, cut or padded to `seq_len`."""
    OWN = "own"
    """A document a sequence, cut to `seq_len`; a batch is as long as its longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """What is trained on, and for a user's own workload also what is trained."""

    name: WorkloadName = WorkloadName.SYNTHETIC
    path: str | None = None
    """The text file."""
    tokenizer: str | None = None
    """A folder; None takes bytes for tokens."""
    lengths: Lengths = Lengths.PACKED
    target: str | None = None
    """`package.module.function` of a user's own workload."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the user's function gets besides what `sweep` offers it."""
    digest: str | None = None
    """Of the text, or of the source of the user's module: a changed file is another cell."""

    def __post_init__(self) -> None:
        if (self.path is not None) != (self.name is WorkloadName.TEXT):
            raise SpecError("workload.path", self.path, "give a text file, with workload=text")
        if (self.target is not None) != (self.name is WorkloadName.OWN):
            raise SpecError("workload._target_", self.target, "give package.module.function, with workload=own")

    @property
    def full_length(self) -> bool:
        """Whether every sequence is known to have `seq_len` tokens and no padding."""
        return self.name is WorkloadName.SYNTHETIC or (
            self.name is WorkloadName.TEXT and self.lengths is Lengths.PACKED
        )

    @property
    def label(self) -> str:
        if self.target is not None:
            return self.target
        return self.name.value if self.path is None else f"{Path(self.path).name}, {self.lengths.value}"
