"""What a sweep found, in words and tables: on screen, and as Markdown.

One line per series; the Markdown also holds the failures with their reasons, the environment, and what was measured
and what was not. Nothing here needs torch.
"""

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sweep import analysis
from sweep.analysis import Row, Series
from sweep.record import CellRecord, Status
from sweep.spec import SizeAxis

WIDEST = 110
NARROWEST_NEXT = 22
SHORT_NAMES = {
    "gradient_checkpointing": "ckpt",
    "expandable_segments": "expand.",
    "precision": "prec.",
    "accumulation": "accum.",
    "world_size": "world",
    "optimizer": "optim.",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    """In full, as Markdown shows it."""
    short: str
    """On screen; a line break where it may be broken."""
    cell: Callable[[Row], str]
    wanted: int = 0
    """0: always shown; else what is left out first where the screen is narrow has the highest number."""
    align: Literal["left", "right"] = "right"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """The columns that have anything to say about these series."""
    cpu = any(row.series.is_cpu for row in rows)
    lengths = bool(rows) and all(row.series.size_axis is SizeAxis.SEQ_LEN for row in rows)
    largest = "longest sequence that fits, in tokens" if lengths else "largest batch that fits, per device"
    reserved, allocated, whole = ("mapped", "resident", "limit") if cpu else ("reserved", "allocated", "capacity")
    configuration = [
        Column(name=axis.replace("_", " "), short=_short(axis), cell=_configured(axis), align="left")
        for axis in (rows[0].configuration if rows else ())
    ]
    measured = [
        Column(name=largest, short=f"{'longest' if lengths else 'largest'}\nthat fits", cell=lambda r: r.largest),
        Column(
            name="largest that runs at all",
            short="runs\nat all",
            cell=lambda r: _number(r.running, "d"),
            wanted=1,
        ),
        Column(name="overall", short="over-\nall", cell=lambda r: _number(r.overall, "d")),
        Column(name="effective", short="effec-\ntive", cell=lambda r: _number(r.effective, "d"), wanted=4),
        Column(
            name=f"{reserved} peak (GiB)",
            short=f"{reserved}\nGiB",
            cell=lambda r: _number(r.reserved_gib, ".2f"),
        ),
        Column(
            name=f"{allocated} peak (GiB)",
            short=f"{allocated}\nGiB",
            cell=lambda r: _number(r.allocated_gib, ".2f"),
            wanted=3,
        ),
        Column(name="active peak (GiB)", short="active\nGiB", cell=lambda r: _number(r.active_gib, ".2f"), wanted=3),
        Column(
            name=f"{reserved}, of {whole}",
            short=f"of\n{whole}",
            cell=lambda r: _number(r.capacity_share, ".0%"),
            wanted=5,
        ),
        Column(name="NVML (GiB)", short="NVML\nGiB", cell=lambda r: _number(r.nvml_gib, ".2f"), wanted=6),
        Column(
            name="seconds per iteration",
            short="s/iter-\nation",
            cell=lambda r: r.timing,
            # Where nothing was timed, the sentence over the table says so as well.
            wanted=0 if any(row.seconds_per_iteration for row in rows) else 9,
        ),
        Column(
            name="tokens/s",
            short="tokens\n/s",
            cell=lambda r: _number(r.tokens_per_second, ",.0f") + r.time_mark,
            wanted=2,
        ),
    ]
    told = [column for column in measured if column.wanted == 0 or any(map(column.cell, rows))]
    if all(row.overall is None for row in rows) and lengths:
        told = [column for column in told if column.name != "overall"]
    if all(row.effective == row.overall for row in rows):
        told = [column for column in told if column.name != "effective"]
    if all(row.running == row.series.largest for row in rows):
        told = [column for column in told if column.name != "largest that runs at all"]
    last = Column(name="next size", short="next size", cell=lambda r: r.next_size, align="left")
    return [*configuration, *told, last]


def _configured(axis: str) -> Callable[[Row], str]:
    return lambda row: row.configuration[axis]


def _short(axis: str) -> str:
    return SHORT_NAMES.get(axis, axis.rsplit(".", 1)[-1].replace("_", "\n"))


def print_summary(console: Console, records: Sequence[CellRecord], *, name: str | None = None) -> None:
    """The table of series, as wide as the console and at most 110 columns; narrow ones get fewer columns."""
    series = analysis.series_of(records)
    if not series:
        console.print("No cell has finished yet.")
        return
    rows = analysis.table(series)
    width = min(console.width, WIDEST)
    columns = _fitting(columns_of(rows), rows, width)
    table = Table(box=box.SIMPLE_HEAD, width=width, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        last, wraps = column is columns[-1], column.align == "left"
        table.add_column(
            column.short, justify=column.align, no_wrap=not wraps, overflow="fold", ratio=1 if last else None
        )
    for row in rows:
        style = None if row.series.best else "dim"
        table.add_row(*(escape(column.cell(row)) for column in columns), style=style)
    title = f"{name}: {analysis.headline(series)}" if name else analysis.headline(series)
    console.print(f"[bold]{escape(title)}[/bold]", width=width, highlight=False)
    for line in (analysis.settings(series), *analysis.caveats(series)):
        if line:
            console.print(escape(line), width=width, highlight=False)
    console.print(table)
    for note in notes_of(rows):
        console.print(escape(note), width=width, highlight=False)


def name_of(one: Series, varying: Iterable[str]) -> str:
    return one.label(varying) or one.label(("model", "engine"))


def notes_of(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table should not miss; facts of a cell are those of the one that is in the table."""
    said = []
    for row in rows:
        facts = analysis.noteworthy(row.series.best) if row.series.best else []
        notes = [*row.notes, *(f"{about}: {fact}" for about, fact in facts)]
        said += [f"{name_of(row.series, row.configuration)}: {note}" for note in notes]
    return said


def _fitting(columns: Sequence[Column], rows: Sequence[Row], width: int) -> list[Column]:
    """Leave out the least wanted columns until the last one has room for its text."""

    def needed(chosen: Sequence[Column]) -> int:
        texts = ([*column.short.split("\n"), *map(column.cell, rows)] for column in chosen[:-1])
        return sum(2 + max(map(len, lines)) for lines in texts) + NARROWEST_NEXT

    chosen = list(columns)
    while needed(chosen) > width and any(column.wanted for column in chosen):
        chosen.remove(max(chosen, key=lambda column: column.wanted))
    if needed(chosen) > width:  # how much was asked for is in the summary as well
        chosen[-1] = replace(chosen[-1], cell=lambda row: re.sub(r", asked for [\d.]+ \w+", "", row.next_size))
    return chosen


def markdown(name: str, records: Sequence[CellRecord]) -> str:
    """The whole summary of a sweep, ending in a line break."""
    series = analysis.series_of(records)
    rows = analysis.table(series)
    columns = columns_of(rows)
    if not rows[0].configuration:
        columns.insert(0, Column(name="series", short="", cell=lambda row: name_of(row.series, ())))
    parts = [f"# {_plain(name)}", _plain(analysis.headline(series))]
    if common := analysis.settings(series):
        parts.append(f"All series: {_plain(common)}.")
    parts.append(_table([c.name for c in columns], [[c.cell(row) for c in columns] for row in rows]))
    if notes := notes_of(rows):
        parts.append(_list(notes))
    parts += ["## What the figures are", _list(meaning(series))]
    if broken := failures(series):
        parts.append("## Cells that gave no figure")
        parts.append(_table(("series", "batch size", "what happened", "repeat with"), broken))
    parts += ["## Environment", _list(environment(records))]
    return "\n\n".join(parts) + "\n"


def failures(series: Sequence[Series]) -> list[list[str]]:
    varying = analysis.varying_axes(series)
    return [
        [name_of(one, varying), str(size), analysis.outcome(record, width=300), record.command]
        for one in series
        for size, record in one.records.items()
        if record.status not in (Status.OK, Status.OOM, Status.THRASHING)
    ]


def meaning(series: Sequence[Series]) -> list[str]:
    said = [sentence[0].upper() + sentence[1:] + "." for sentence in analysis.caveats(series)]
    if not all(one.is_cpu for one in series):
        said.append("Allocated and reserved are the peaks that PyTorch's caching allocator counted, not samples.")
    said.append("Memory is that of the device that reserved most; devices are never summed or averaged.")
    if any(r.nvml_used_peak_bytes for one in series for record in one.measured for r in record.ranks):
        said.append("NVML is the highest sample of the device's used memory, less what was used before.")
    if any(one.time_is_measured for one in series):
        said.append("Seconds per iteration are the median of the measured optimizer steps, of the slowest rank.")
        said.append("Tokens per second count the whole world and every accumulated micro-batch.")
    if any(one.time_is_estimated for one in series):
        said.append("Times marked est. are computed from counted work and the GPU's datasheet.")
    said.append("A batch size that is not named was not tried.")
    return said


def environment(records: Sequence[CellRecord]) -> list[str]:
    """Every fact once; where cells differ in it, all of its values."""
    facts: dict[str, dict[str, None]] = {}
    for record in records:
        devices = {rank.device_name: None for rank in record.ranks}
        known: Mapping[str, object] = {"device": " and ".join(devices) or None, **record.environment}
        for name, value in known.items():
            if value is not None:
                text = ", ".join(dict.fromkeys(map(str, value))) if isinstance(value, list | tuple) else str(value)
                if name.endswith("_bytes") and isinstance(value, int):
                    name, text = name.removesuffix("_bytes"), analysis.size_text(value)
                facts.setdefault(name.replace("_", " "), {})[text] = None
    return [f"{name}: {' / '.join(values)}" for name, values in facts.items()]


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: records may hold anything, such as a model's name or an exception."""
    for special in "\\`*_[]|#":
        text = text.replace(special, "\\" + special)
    return html.escape(" ".join(text.split()), quote=False)


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_plain(line)}" for line in lines)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [[_plain(cell) for cell in line] for line in (head, *body)]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
