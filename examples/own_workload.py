"""A workload of one's own: a private model with a private loss, a private collator, an optimizer with two groups.

    python -m sweep.run workload._target_=examples.own_workload.build +workload.width=64 device=cpu grid=none seq_len=64

`sweep` calls `build` on every rank with what it has parameters for, of these: batch_size, seq_len, rank, world_size,
seed, dtype, gradient_checkpointing, and model, which is the one of `model=...`. Everything else comes from
`+workload.NAME=VALUE`. The current folder is on the path, as it is for `python -m`.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset


class Scorer(nn.Module):
    """Reads a sequence and gives one number; its forward pass gives the loss, which is all that `sweep` asks of it."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        """`tokens` (batch, sequence), `lengths` and `score` (batch,); the mean Huber loss."""
        padding = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        scores = self.head(hidden[:, 0]).squeeze(-1)
        return F.huber_loss(scores.float(), score)  # an engine may compute in half precision


class Reviews(IterableDataset[tuple[torch.Tensor, float]]):
    """Made-up reviews of any length."""

    def __init__(self, longest: int, vocabulary: int, seed: int) -> None:
        self.longest, self.vocabulary, self.seed = longest, vocabulary, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, float]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            length = int(torch.randint(1, self.longest + 1, (), generator=generator))
            yield torch.randint(1, self.vocabulary, (length,), generator=generator), length / self.longest


def build(
    batch_size: int, seq_len: int, rank: int, seed: int, width: int = 64
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, float]]]:
    model = Scorer(vocabulary=1000, width=width)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])

    def collate(reviews: list[tuple[torch.Tensor, float]]) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(len(reviews), seq_len, dtype=torch.long)  # always at the maximum
        for row, (review, _) in enumerate(reviews):
            tokens[row, : len(review)] = review
        lengths = torch.tensor([len(review) for review, _ in reviews])
        return {"tokens": tokens, "lengths": lengths, "score": torch.tensor([score for _, score in reviews])}

    data = Reviews(seq_len, vocabulary=1000, seed=seed * 1000 + rank)
    return model, optimizer, DataLoader(data, batch_size=batch_size, collate_fn=collate)
