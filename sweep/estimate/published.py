"""Estimates beside published measurements, from the table and the counted work of its cells."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweep import virtual
from sweep.estimate.factors import Factors
from sweep.estimate.fit import Measured, errors, fit
from sweep.estimate.work import read_file
from sweep.virtual import GpuProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedCell:
    """One row of a table, of its first rank."""

    gradient_checkpointing: bool
    expandable_segments: bool
    batch_size: int
    cell: Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Seconds per additional sample by checkpointing, from the smallest to the largest batch size; and their ratio."""

    per_sample: Mapping[bool, float]

    @property
    def ratio(self) -> float:
        return self.per_sample[True] / self.per_sample[False]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTable:
    """The cells of a table that ran well, in its order."""

    name: str
    gpu: GpuProfile
    cells: Sequence[PublishedCell]

    def errors(self, factors: Factors | None = None) -> list[float]:
        """Relative error of each estimate; with the default factors unless told."""
        return errors([each.cell for each in self.cells], self.gpu, factors or Factors())

    def lines(self, relative_errors: Sequence[float] | None = None) -> Lines:
        """As measured, or as estimated with these errors."""
        found = {}
        for checkpointing in (False, True):
            points = {
                each.batch_size: each.cell.seconds_per_iteration * (1 + error)
                for each, error in zip(self.cells, relative_errors or [0.0] * len(self.cells), strict=True)
                if each.gradient_checkpointing is checkpointing and each.expandable_segments
            }
            low, high = min(points), max(points)
            found[checkpointing] = (points[high] - points[low]) / (high - low)
        return Lines(per_sample=found)

    def errors_of_other_half(self, first: int) -> list[float]:
        """Fitted to every second row, starting with `first` (0 or 1): the errors of the rows left out."""
        known = [each.cell for each in self.cells[first::2]]
        factors = fit(known, self.gpu, f"half of {self.name}").factors
        return errors([each.cell for each in self.cells[1 - first :: 2]], self.gpu, factors)


def read_table(path: Path, gpu: str, work: Path, prefix: str, largest: int | None = None) -> PublishedTable:
    """The table with work from `work/<prefix>-<plain|ckpt>-<batch size>.json.gz`; sizes above `largest` thrashed."""
    cells = []
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            size, checkpointing = int(row["batch_size"]), row["gradient_checkpointing"] == "True"
            if row["status"] != "ok" or row["rank"] != "0" or (largest and size > largest):
                continue
            counted = read_file(work / f"{prefix}-{'ckpt' if checkpointing else 'plain'}-{size}.json.gz")
            assert counted is not None, f"the work of {prefix} at batch size {size} is missing"
            cells.append(
                PublishedCell(
                    gradient_checkpointing=checkpointing,
                    expandable_segments=row["expandable_segments"] == "True",
                    batch_size=size,
                    cell=Measured(work=counted, seconds_per_iteration=float(row["seconds_per_iteration"])),
                )
            )
    return PublishedTable(name=path.stem, gpu=virtual.gpu(gpu), cells=cells)
