"""Full-length sequences of random tokens."""

import torch

from sweep.spec import CellSpec, Task
from sweep.worker.model import vocabulary_of


class RandomBatches:
    """The worst case for memory; the same for the same seed and rank.

    Also the same samples in the same order however they are divided into micro-batches, so that accumulation and a
    real batch of the same effective size train on the same data.
    """

    def __init__(self, spec: CellSpec, rank: int, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._vocabulary = vocabulary_of(spec.model)
        self._tokens = torch.Generator().manual_seed(spec.seed * 1_000_003 + rank)
        self._labels = torch.Generator().manual_seed(spec.seed * 1_000_003 + rank + 500_000)
        self.tokens: int | None = 0

    def next(self) -> dict[str, torch.Tensor]:
        """`input_ids` (batch, sequence) and `labels`: the same for a causal LM, (batch,) for a classifier."""
        spec = self._spec
        shape = (spec.batch_size, spec.seq_len)
        tokens = torch.randint(1, self._vocabulary, shape, generator=self._tokens).to(self._device)
        self.tokens = (self.tokens or 0) + tokens.numel()
        if spec.model.task is Task.SEQUENCE_CLASSIFICATION:
            labels = torch.randint(0, 2, shape[:1], generator=self._labels).to(self._device)
            return {"input_ids": tokens, "labels": labels}
        return {"input_ids": tokens, "labels": tokens}
