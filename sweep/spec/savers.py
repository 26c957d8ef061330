"""What saves memory beside the engine: adapters, kernels, attention, the loss."""

from dataclasses import dataclass
from enum import Enum

from sweep.spec.fields import positive


class Attention(str, Enum):
    """`attn_implementation` of transformers."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLASH = "flash"


class Loss(str, Enum):
    FULL = "full"
    """Logits of all tokens at once, in fp32, as transformers computes them."""
    FUSED = "fused"
    """Liger's fused linear cross-entropy: the head and the loss together, some tokens at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """Low-rank adapters through peft: they alone are trained."""

    rank: int
    targets: tuple[str, ...] = ()
    """Names of the layers that get one; none named: every linear layer but the head."""

    def __post_init__(self) -> None:
        positive("lora.rank", self.rank)
