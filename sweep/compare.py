"""Sweeps cell by cell: `sweep compare results/A results/B [results/C ...] [--memory 2%] [--time 10%] [--ignore AXIS]`.

Another GPU, another library version, virtual against real, before and after a change; each against the first. Cells
belong together that have the same axes and batch size; which device ran them is what may differ. Exit code 0: within
the tolerance, 1: not, 2: nothing to compare. `--markdown FILE` writes every figure with its relative error.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sweep import analysis
from sweep.analysis import MIB, AxisError, Series, timing_of
from sweep.record import CellRecord, Status
from sweep.store import Store, StoreError, write_atomically

DEVICE_AXES = ("device", "gpu")
RAN = (Status.OK, Status.THRASHING)
Key = tuple[tuple[str, object], ...]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    memory: float = 0.02
    time: float = 0.10


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One cell that both sweeps have."""

    label: str
    batch_size: int
    before: CellRecord
    after: CellRecord

    @property
    def used_name(self) -> str:
        """The counter of tensors that both have: allocated, else active."""
        return "allocated" if _change(self.before, self.after, "allocated") is not None else "active"

    @property
    def used(self) -> float | None:
        return _change(self.before, self.after, self.used_name)

    @property
    def reserved(self) -> float | None:
        return _change(self.before, self.after, "reserved")

    @property
    def time(self) -> float | None:
        """Relative change of seconds per iteration; None where one is not known, or only one measured."""
        before, after = timing_of(self.before), timing_of(self.after)
        return after.seconds / before.seconds - 1 if before and after and before.kind is after.kind else None

    @property
    def estimate_error(self) -> float | None:
        """Of the estimate of one side, relative to what the other measured; None where it is not that."""
        before, after = timing_of(self.before), timing_of(self.after)
        if before is None or after is None or before.kind is after.kind:
            return None
        return before.seconds / after.seconds - 1 if before.is_estimated else after.seconds / before.seconds - 1

    @property
    def same_outcome(self) -> bool:
        """Whether both ran, or both ended alike: thrashing is a matter of speed, which is compared on its own."""
        before, after = self.before.status, self.after.status
        return before is after or (before in RAN and after in RAN)

    def beyond(self, tolerance: Tolerance) -> list[str]:
        """What of this cell differs by more than is tolerated."""
        if not self.same_outcome:
            return [f"{self.before.status.value} -> {self.after.status.value}"]
        changes = {
            self.used_name: (self.used, tolerance.memory),
            "reserved": (self.reserved, tolerance.memory),
            "time": (self.time, tolerance.time),
        }
        return [
            f"{name} {change:+.1%}"
            for name, (change, most) in changes.items()
            if change is not None and abs(change) > most
        ]


def _change(before: CellRecord, after: CellRecord, counter: str) -> float | None:
    first, second = before.largest_rank, after.largest_rank
    if first is None or second is None:
        return None
    old, new = (getattr(rank, f"{counter}_peak_bytes") for rank in (first, second))
    return None if not old or new is None else new / old - 1


def differences(
    before: Sequence[Series], after: Sequence[Series], ignore: Iterable[str] = ()
) -> tuple[list[Difference], int, int]:
    """The cells of both, and how many only the first and only the second has. Raises `AxisError`."""
    left_out = {*DEVICE_AXES, *ignore}
    known = {axis for one in (*before, *after) for axis in one.axes}
    for axis in left_out - known:
        raise AxisError(f"--ignore {axis}: choose one of {', '.join(sorted(known))}")
    first, second = _cells(before, left_out), _cells(after, left_out)
    varying = [a for a in analysis.varying_axes([*before, *after]) if a not in left_out]
    found = [
        Difference(label=one.label(varying), batch_size=one.size_of(record), before=record, after=second[key][1])
        for key, (one, record) in first.items()
        if key in second
    ]
    return found, len(first) - len(found), len(second) - len(found)


def _cells(series: Sequence[Series], left_out: set[str]) -> dict[Key, tuple[Series, CellRecord]]:
    cells: dict[Key, tuple[Series, CellRecord]] = {}
    for one in series:
        axes = tuple((name, value) for name, value in one.axes.items() if name not in left_out)
        for size, record in one.records.items():
            if cells.setdefault((*axes, ("batch_size", size)), (one, record))[0] is not one:
                raise AxisError("two series of one sweep differ in nothing that is compared; narrow them with --where")
    return cells


def show(console: Console, found: Sequence[Difference], tolerance: Tolerance, everything: bool) -> int:
    """Print the table; the number of cells beyond the tolerance."""
    beyond = [one for one in found if one.beyond(tolerance)]
    listed = found if everything else beyond
    if listed:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("series", "batch\nsize", "tensors", "reserved", "time", "beyond the tolerance"):
            table.add_column(title, justify="left" if title in ("series", "beyond the tolerance") else "right")
        for one in listed:
            figures = ["" if change is None else f"{change:+.1%}" for change in (one.used, one.reserved, one.time)]
            if one.estimate_error is not None:
                figures[-1] = f"est. {one.estimate_error:+.1%}"
            table.add_row(escape(one.label), str(one.batch_size), *figures, escape(", ".join(one.beyond(tolerance))))
        console.print(table)
    timed = sum(one.time is not None for one in found)
    console.print(
        f"{len(beyond)} of {len(found)} cells differ by more than {tolerance.memory:.1%} in memory or "
        f"{tolerance.time:.1%} in time (time known on both sides for {timed})",
        highlight=False,
    )
    if errors := [one.estimate_error for one in found if one.estimate_error is not None]:
        console.print(
            f"estimated against measured time in {len(errors)} cells: median error {statistics.median(errors):+.1%}, "
            f"from {min(errors):+.1%} to {max(errors):+.1%}; an estimate is not held to the tolerance",
            highlight=False,
        )
    return len(beyond)


Side = tuple[str, Sequence[Series]]
"""The name of a sweep, and what is compared of it."""


def markdown(sides: Sequence[Side], ignore: Iterable[str] = ()) -> str:
    """A row per cell of the first sweep that another one has too: each figure, and its error relative to the first.

    Memory is the headline device's peak in MiB. Raises `AxisError`.
    """
    left_out = {*DEVICE_AXES, *ignore}
    every = [one for _, series in sides for one in series]
    varying = [axis for axis in analysis.varying_axes(every) if axis not in left_out]
    found = [_cells(series, left_out) for _, series in sides]
    shared = [key for key in found[0] if any(key in other for other in found[1:])]
    head, columns = ["series", "batch size"], []
    for title, figure, form in FIGURES:
        values = [{key: figure(cells[key][1]) for key in shared if key in cells} for cells in found]
        if not any(other.get(key) and values[0].get(key) for other in values[1:] for key in shared):
            continue  # nothing that could be compared
        for number, (name, _) in enumerate(sides):
            head.append(f"{title}, {name}")
            columns.append([_figure(found[number].get(key), values[number].get(key), form) for key in shared])
            if number:
                head.append(f"{title} error, {name}")
                columns.append([_error(values[0].get(key), values[number].get(key)) for key in shared])
    firsts = [found[0][key] for key in shared]
    labels = [[one.label(varying), str(one.size_of(record))] for one, record in firsts]
    rows = [[*label, *cells] for label, *cells in zip(labels, *columns, strict=True)]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _peak(counter: str) -> Callable[[CellRecord], float | None]:
    def read(record: CellRecord) -> float | None:
        rank = record.largest_rank if record.status in RAN else None
        size = getattr(rank, f"{counter}_peak_bytes") if rank else None
        return None if size is None else size / MIB

    return read


def _seconds(record: CellRecord) -> float | None:
    timing = timing_of(record)
    return timing.seconds if timing else None


FIGURES: tuple[tuple[str, Callable[[CellRecord], float | None], str], ...] = (
    ("allocated", _peak("allocated"), ".0f"),
    ("active", _peak("active"), ".0f"),
    ("reserved", _peak("reserved"), ".0f"),
    ("seconds per iteration", _seconds, ".4g"),
)


def _figure(cell: tuple[Series, CellRecord] | None, value: float | None, form: str) -> str:
    if cell is None:
        return "not run"
    if cell[1].status not in RAN:
        return "OOM" if cell[1].status is Status.OOM else cell[1].status.value.replace("_", " ")
    return "" if value is None else format(value, form)


def _error(reference: float | None, value: float | None) -> str:
    return f"{value / reference - 1:+.2%}" if reference and value is not None else ""


def _part(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}: give a part, such as 2% or 0.02")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep compare", description="Compare two sweeps cell by cell.")
    parser.add_argument("before", type=Path, help="what the others are compared with")
    parser.add_argument("after", type=Path, nargs="+", help="folders of results, each compared with the first")
    parser.add_argument("--memory", type=_part, default=0.02, help="tolerated change of memory; default: 2%%")
    parser.add_argument("--time", type=_part, default=0.10, help="tolerated change of seconds; default: 10%%")
    parser.add_argument("--ignore", action="append", default=[], metavar="AXIS", help="axes that may differ as well")
    parser.add_argument("--where", action="append", default=[], metavar="AXIS=VALUE", help="only these series")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write every figure and its error as a table")
    parser.add_argument("--all", action="store_true", help="list every cell, not only those that differ")
    options = parser.parse_args(arguments)
    console = Console(width=max(100, Console().width))
    tolerance = Tolerance(memory=options.memory, time=options.time)
    try:
        before, *others = sides = [_side(console, path, options.where) for path in (options.before, *options.after)]
        # Everything is found before anything is said: a sweep that cannot be compared is no difference.
        compared = [differences(before[1], after[1], options.ignore) for after in others]
        for (name, _), (found, _, _) in zip(others, compared, strict=True):
            if not found:
                raise StoreError(f"{before[0]} and {name} have no cell in common; --ignore AXIS lets an axis differ")
        if options.markdown:
            write_atomically(options.markdown, markdown(sides, options.ignore))
    except (StoreError, AxisError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 2
    beyond = 0
    for (name, _), (found, only_before, only_after) in zip(others, compared, strict=True):
        if len(others) > 1:
            console.print(f"\n{escape(before[0])} -> {escape(name)}", highlight=False)
        beyond += show(console, found, tolerance, options.all)
        if only_before or only_after:
            console.print(f"only the first has {only_before} more cells, only the second {only_after}", highlight=False)
    return 1 if beyond else 0


def _side(console: Console, path: Path, where: Sequence[str]) -> Side:
    series = analysis.series_of(Store(path.resolve()).records())
    if not series:
        raise StoreError(f"{path} holds no finished cell; `make sweep` makes some")
    console.print(f"{escape(path.name)}: {escape(analysis.headline(series))}", highlight=False)
    for sentence in analysis.caveats(series):
        console.print(f"  {escape(sentence)}", highlight=False)
    return path.name, analysis.chosen(series, where)


if __name__ == "__main__":
    sys.exit(main())
