"""What a person sees while a sweep runs: one bar over the series, and the cell that is being measured."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from sweep import analysis
from sweep.record import CellRecord, Status
from sweep.spec import CellSpec


class Screen:
    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self.with_length = False
        """Whether cells are told with their sequence length: where that is what is searched."""

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def series(self, total: int) -> Iterator[None]:
        columns = (
            SpinnerColumn(),
            TextColumn("series"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            self._progress = progress
            self._task = progress.add_task("", total=total)
            try:
                yield
            finally:
                self._progress = None

    def measuring(self, cells: list[CellSpec]) -> None:
        if self._progress and cells:
            more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
            self._progress.update(self._task, description=title(cells[0], self.with_length) + more)

    def measured(self, record: CellRecord) -> None:
        self.say(f"{title(record.spec, self.with_length):<64} {outcome(record)}")

    def planned(self, spec: CellSpec) -> None:
        self.say(title(spec, self.with_length))

    def series_done(self) -> None:
        if self._progress:
            self._progress.advance(self._task)


def title(spec: CellSpec, with_length: bool = False) -> str:
    """A cell in a few words, the ones that the usual grids vary."""
    parts = [
        f"{spec.model.name} {spec.engine.label}",
        spec.precision.value,
        "checkpointing" if spec.gradient_checkpointing else "",
        "expandable" if spec.expandable_segments else "",
        f"accumulation {spec.accumulation}" if spec.accumulation > 1 else "",
        f"batch {spec.batch_size}",
        f"sequence length {spec.seq_len}" if with_length else "",
    ]
    return ", ".join(filter(None, parts))


def outcome(record: CellRecord) -> str:
    """What became of a cell, with its figures where it ran."""
    text, largest = analysis.outcome(record), record.largest_rank
    if record.status not in (Status.OK, Status.THRASHING) or largest is None:
        return text
    timing = analysis.timing_of(record)
    time = f", {timing.seconds:.3g} s/iteration{timing.mark}" if timing else ""
    return f"{text}, {analysis.size_text(largest.reserved_peak_bytes or 0)} reserved{time}"
