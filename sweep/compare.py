"""Two sweeps, cell by cell: `sweep compare results/A results/B [--memory 2%] [--time 10%] [--ignore AXIS]`.

Another GPU, another library version, virtual against real, before and after a change. Cells belong together that have
the same axes and batch size; which device ran them is what may differ. Exit code 0: within the tolerance, 1: not,
2: nothing to compare.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sweep import analysis
from sweep.analysis import AxisError, Series, timing_of
from sweep.record import CellRecord, Status
from sweep.store import Store, StoreError

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
        """Relative change of seconds per iteration; None where either was not measured."""
        before, after = timing_of(self.before), timing_of(self.after)
        return after.seconds / before.seconds - 1 if before and after else None

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
        Difference(label=one.label(varying), batch_size=record.spec.batch_size, before=record, after=second[key][1])
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
            figures = ("" if change is None else f"{change:+.1%}" for change in (one.used, one.reserved, one.time))
            table.add_row(escape(one.label), str(one.batch_size), *figures, escape(", ".join(one.beyond(tolerance))))
        console.print(table)
    timed = sum(one.time is not None for one in found)
    console.print(
        f"{len(beyond)} of {len(found)} cells differ by more than {tolerance.memory:.1%} in memory or "
        f"{tolerance.time:.1%} in time (time known on both sides for {timed})",
        highlight=False,
    )
    return len(beyond)


def _part(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}: give a part, such as 2% or 0.02")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep compare", description="Compare two sweeps cell by cell.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--memory", type=_part, default=0.02, help="tolerated change of memory; default: 2%%")
    parser.add_argument("--time", type=_part, default=0.10, help="tolerated change of seconds; default: 10%%")
    parser.add_argument("--ignore", action="append", default=[], metavar="AXIS", help="axes that may differ as well")
    parser.add_argument("--where", action="append", default=[], metavar="AXIS=VALUE", help="only these series")
    parser.add_argument("--all", action="store_true", help="list every cell, not only those that differ")
    options = parser.parse_args(arguments)
    console = Console(width=max(100, Console().width))
    try:
        sides = []
        for path in (options.before, options.after):
            series = analysis.series_of(Store(path.resolve()).records())
            if not series:
                raise StoreError(f"{path} holds no finished cell; `make sweep` makes some")
            sides.append(analysis.chosen(series, options.where))
            console.print(f"{escape(path.name)}: {escape(analysis.headline(series))}", highlight=False)
            for sentence in analysis.caveats(series):
                console.print(f"  {escape(sentence)}", highlight=False)
        before, after = sides
        found, only_before, only_after = differences(before, after, options.ignore)
        if not found:
            raise StoreError("the two have no cell in common; --ignore AXIS lets an axis differ")
    except (StoreError, AxisError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 2
    beyond = show(console, found, Tolerance(memory=options.memory, time=options.time), options.all)
    if only_before or only_after:
        console.print(f"only the first has {only_before} more cells, only the second {only_after}", highlight=False)
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
