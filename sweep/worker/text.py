"""Sequences of a text file: bytes or a tokenizer's tokens; packed, padded to the maximum, or as long as they are."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from sweep.spec import CellSpec, Lengths, SpecError, Task
from sweep.worker.model import vocabulary_of

PADDING, IGNORED = 0, -100
"""The token that fills up a sequence, and the label of it: what PyTorch's cross entropy ignores."""


class TextBatches:
    """In an order that depends on the seed alone; the ranks take turns. From the start again when it is used up."""

    def __init__(self, spec: CellSpec, rank: int, device: torch.device) -> None:
        self._spec, self._device = spec, device
        sequences = sequences_of(spec)
        self._generator = torch.Generator().manual_seed(spec.seed)
        order = torch.randperm(len(sequences), generator=self._generator).tolist()
        self._sequences = [sequences[i] for i in order]
        self._at, self._stride = rank * spec.batch_size, spec.data_parallel_size * spec.batch_size
        self.tokens: int | None = 0

    def next(self) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels` (batch, sequence), and `attention_mask` where sequences are padded.

        The labels of a classifier, (batch,), are drawn at random: they decide neither memory nor time.
        """
        spec = self._spec
        chosen = [self._sequences[(self._at + i) % len(self._sequences)] for i in range(spec.batch_size)]
        self._at += self._stride
        self.tokens = (self.tokens or 0) + sum(map(len, chosen))
        longest = max(map(len, chosen)) if spec.workload.lengths is Lengths.OWN else spec.seq_len
        ids = torch.full((spec.batch_size, longest), PADDING)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(chosen):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        batch = {"input_ids": ids} if spec.workload.full_length else {"input_ids": ids, "attention_mask": mask}
        if spec.model.task is Task.SEQUENCE_CLASSIFICATION:
            batch["labels"] = torch.randint(0, 2, (spec.batch_size,), generator=self._generator)
        else:
            batch["labels"] = ids.masked_fill(mask == 0, IGNORED)
        return {name: tensor.to(self._device) for name, tensor in batch.items()}


def sequences_of(spec: CellSpec) -> list[list[int]]:
    """All sequences of the text, of at most `seq_len` tokens. Raises `SpecError` where it holds none."""
    workload, vocabulary = spec.workload, vocabulary_of(spec.model)
    assert workload.path is not None
    text = Path(workload.path).read_text(encoding="utf-8", errors="replace")
    documents = encoded([part for part in re.split(r"\n\s*\n", text) if part.strip()], workload.tokenizer)
    largest = max((max(document) for document in documents if document), default=0)
    if largest >= vocabulary:
        valid = f"its tokens go up to {largest}, and model={spec.model.name} has a vocabulary of {vocabulary}"
        raise SpecError("workload.tokenizer", workload.tokenizer or "null", valid)
    if workload.lengths is Lengths.PACKED:
        stream = [token for document in documents for token in document]
        length = spec.seq_len
        sequences = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
    else:
        sequences = [document[: spec.seq_len] for document in documents if document]
    if not sequences:
        raise SpecError("workload.path", workload.path, f"it has not one sequence of seq_len={spec.seq_len} tokens")
    return sequences


def encoded(documents: Sequence[str], tokenizer: str | None) -> list[list[int]]:
    """As tokens: a byte is its value plus one, so that 0 is left for padding."""
    if tokenizer is None:
        return [[byte + 1 for byte in document.encode()] for document in documents]
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(Path(tokenizer).expanduser(), local_files_only=True)
    end = [] if loaded.eos_token_id is None else [loaded.eos_token_id]
    return [[*loaded.encode(document, add_special_tokens=False), *end] for document in documents]
