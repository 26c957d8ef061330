"""The report of a sweep as one HTML page that needs nothing else: no network, no other file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sweep import analysis
from sweep.analysis import GIB, Series
from sweep.plots.web import inline_charts
from sweep.record import CellRecord
from sweep.summary import columns_of, environment, failures, meaning, name_of, notes_of

MOST_CELLS = 2000
"""Cells whose command is listed; `cells.csv` holds the others."""


def page(name: str, records: Sequence[CellRecord]) -> str:
    """The whole page. Everything that comes out of a record is escaped."""
    series = analysis.series_of(records)
    rows = analysis.table(series)
    columns = columns_of(rows)
    varying = analysis.varying_axes(series)
    configured = not rows[0].configuration
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    every = [(one, size, record) for one in series for size, record in one.records.items()]
    return templates.get_template(
        "page.html"
    ).render(
        name=name,
        headline=analysis.headline(series),
        settings=analysis.settings(series),
        kinds=_kinds(series),
        answers=[(name_of(row.series, varying), row.answer) for row in rows[:12]],
        more_answers=max(0, len(rows) - 12),
        head=[*(["series"] if configured else []), *(column.name for column in columns)],
        body=[
            [*([name_of(row.series, ())] if configured else []), *(column.cell(row) for column in columns)]
            for row in rows
        ],
        notes=notes_of(rows),
        # The charts are matplotlib's own SVG, with every text in it escaped by its XML writer.
        charts=[(title, Markup(svg)) for title, svg in inline_charts(series)],  # noqa: S704
        failures=failures(series),
        meaning=meaning(series),
        environment=environment(records),
        cells=[_cell(*one, varying) for one in every[:MOST_CELLS]],
        more_cells=max(0, len(every) - MOST_CELLS),
    )


def _kinds(series: Sequence[Series]) -> list[str]:
    """What is measured here, and what is not, in a word each."""
    said = []
    if any(not (one.is_virtual or one.imported_from) for one in series):
        said.append("measured")
    if any(one.is_virtual for one in series):
        said.append("virtual: time not measured")
    if any(one.time_is_estimated for one in series):
        said.append("times estimated")
    if any(one.imported_from for one in series):
        said.append("imported")
    return said


def _cell(one: Series, size: int, record: CellRecord, varying: Sequence[str]) -> dict[str, Any]:
    rank, timing = record.largest_rank, analysis.timing_of(record)
    reserved = rank.reserved_peak_bytes if rank else None
    return {
        "series": name_of(one, varying),
        "size": size,
        "outcome": analysis.outcome(record, width=300),
        "reserved": f"{reserved / GIB:.2f}" if reserved else "",
        "seconds": f"{timing.seconds:.4g}{timing.mark}" if timing else "",
        "details": analysis.details(record),
        "command": record.command,
    }
