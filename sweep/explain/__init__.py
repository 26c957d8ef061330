"""What the memory is at the moment of the peak, and what would bring it down: `sweep explain CELL`.

CELL is a cell's identifier or folder, or overrides as for `sweep.run`, which run now, on the virtual device unless they
name another. Two cells are compared; several that differ in batch size alone show what grows.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape

from sweep.environment import DeviceError
from sweep.explain import charts, growth, text
from sweep.explain.cells import Explained, ExplainError, explained, subjects
from sweep.explain.findings import apply_rules
from sweep.explain.savings import verify
from sweep.spec import DeviceKind, SpecError
from sweep.store import PLOTS, StoreError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep explain", description=__doc__)
    parser.add_argument("cells", nargs="+", metavar="CELL", help="identifier, folder, or overrides such as model=tiny")
    parser.add_argument("--again", action="store_true", help="run and watch again what is explained already")
    parser.add_argument("--snapshot", action="store_true", help="keep PyTorch's snapshot, for pytorch.org/memory_viz")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="run what the findings suggest on the virtual device; default: for virtual cells",
    )
    parser.add_argument("--out", type=Path, default=PLOTS, help="where <sweep>/explain/ goes with the charts")
    options = parser.parse_args(arguments)
    console = Console(width=max(100, Console().width))
    try:
        cells = [explained(one, again=options.again, snapshot=options.snapshot) for one in subjects(options.cells)]
        _report(console, cells, options.verify)
        for path in _draw(cells, options.out):
            console.print(escape(str(path)), highlight=False)
    except (ExplainError, SpecError, DeviceError, StoreError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def _report(console: Console, cells: Sequence[Explained], wanted: bool | None) -> None:
    for cell in cells if len(cells) < 3 else cells[-1:]:
        text.show(console, cell)
        found = apply_rules(cell.explanation, cell.record)
        check = cell.explanation.spec.device.kind is DeviceKind.VIRTUAL if wanted is None else wanted
        for number, finding in enumerate(found, start=1):
            text.show_finding(console, number, finding, verify(finding, cell) if check else None)
        if not found:
            console.print("No rule finds anything that would bring this peak down.")
        for path in cell.snapshots:
            console.print(f"snapshot for https://pytorch.org/memory_viz: {escape(str(path))}", highlight=False)
        console.print()
    if len(cells) == 2:
        text.show_difference(console, cells[0].explanation, cells[1].explanation)
    if _one_series(cells):
        console.print("[bold]with the batch size[/bold]")
        for sentence in growth.sentences([cell.explanation for cell in cells]):
            console.print(f"  {escape(sentence)}", highlight=False)


def _one_series(cells: Sequence[Explained]) -> bool:
    """Whether they differ in batch size alone."""
    specs = [replace(cell.explanation.spec, batch_size=1) for cell in cells]
    sizes = {cell.explanation.spec.batch_size for cell in cells}
    return len(sizes) == len(cells) > 1 and all(spec == specs[0] for spec in specs)


def _draw(cells: Sequence[Explained], out: Path) -> list[Path]:
    out = out / cells[0].subject.store.name / "explain"
    figures: dict[str, Callable[[], Figure]] = {}
    for cell in cells:
        figures[f"{cell.subject.identifier}-timeline"] = lambda one=cell.explanation: charts.timeline_figure(one)  # type: ignore[misc]
    several = [cell.explanation for cell in cells]
    first, last = cells[0].subject.identifier, cells[-1].subject.identifier
    if _one_series(cells):
        ordered = sorted(several, key=lambda one: one.spec.batch_size)
        figures[f"{first}-batch-sizes"] = lambda: charts.growth_figure(ordered)
    elif len(cells) == 2:
        figures[f"{first}-{last}"] = lambda: charts.comparison_figure(several[0], several[1])
    return charts.save(figures, out)
