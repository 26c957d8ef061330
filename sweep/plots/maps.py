"""Maps: what became of every cell, and how the largest batch size depends on two axes."""

import math
from collections import Counter
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from sweep import analysis
from sweep.analysis import GIB, AxisError, Series, axis_cell, axis_name, varying_axes
from sweep.plots.style import BLACK, MOST_PANELS, Group, filled, framed, name_of
from sweep.record import CellRecord, Status

MOST_ROWS = 40
MOST_COLUMNS = 26
MOST_LETTERS = 80
FEWEST_CELLS = 6
"""From which two axes are a map of their own, unasked."""
BATCH_SIZE = "batch_size"
COLOURS = mpl.colormaps["cividis"]

MapAxes = tuple[str, str]
"""Rows, columns."""


def heat_map(series: Group) -> Figure:
    """A row per series, a column per batch size: how full the device was, or what happened instead."""
    shown = series[:MOST_ROWS]
    sizes = _sizes(shown)
    varying = varying_axes(series)
    names = [name_of(one, varying, MOST_LETTERS) for one in shown]
    width = 1.6 + 0.075 * max(map(len, names)) + 0.5 * len(sizes)
    figure = Figure(figsize=(max(8, width), 2.4 + 0.34 * len(shown)))
    axes = figure.subplots()
    for y, one in enumerate(shown):
        for x, size in enumerate(sizes):
            if size <= one.last_telling:
                _draw_cell(axes, x, y, one, size)
    _frame_cells(axes, list(map(str, sizes)), names)
    axes.set_xlabel(" or ".join(dict.fromkeys(one.size_label for one in series)))
    notes = [CELL_NOTE]
    if len(series) > len(shown):
        notes.append(f"the first {len(shown)} of {len(series)} series")
    figure.colorbar(
        mpl.cm.ScalarMappable(Normalize(0, 1), COLOURS), ax=axes, label="reserved, part of capacity", fraction=0.04
    )
    return framed(figure, series, analysis.settings(series), [], [*notes, *analysis.caveats(series)])


def widest_axes(series: Group) -> MapAxes | None:
    """The two axes with most values, where they span enough cells to be worth a map."""
    counts = Counter(
        {axis: len({one.value(axis) for one in series}) for axis in varying_axes(series) if axis != BATCH_SIZE}
    )
    widest = counts.most_common(2)
    if len(widest) < 2 or widest[0][1] * widest[1][1] < FEWEST_CELLS:
        return None
    return widest[1][0], widest[0][0]


def limits_map(series: Group, rows: str, columns: str) -> Figure:
    """The largest usable batch size over two axes; with `batch_size` as one of them, memory. A panel per rest of them.

    Raises `AxisError` for an axis that these series do not have.
    """
    known = {*series[0].axes, *(name for one in series for name in one.details), BATCH_SIZE}
    for axis in (rows, columns):
        if axis not in known:
            raise AxisError(f"--axes {axis}: choose from {', '.join((*varying_axes(series), BATCH_SIZE))}")
    rest = [axis for axis in varying_axes(series) if axis not in (rows, columns)]
    groups: dict[tuple[object, ...], list[Series]] = {}
    for one in series:
        groups.setdefault(tuple(one.value(axis) for axis in rest), []).append(one)
    panels = list(groups.values())[:MOST_PANELS]
    shown = [one for group in panels for one in group]
    ys, xs = (_values(shown, axis) for axis in (rows, columns))
    wide = 2 if len(panels) > 1 and len(xs) <= MOST_COLUMNS // 2 else 1
    high = math.ceil(len(panels) / wide)
    labels = [axis_cell(rows, y) for y in ys]
    width = wide * (1.8 + 0.085 * max(map(len, labels)) + 0.62 * len(xs)) + 1
    figure = Figure(figsize=(max(8, width), high * (0.9 + 0.36 * len(ys)) + 1.9))
    grid: list[Axes] = list(figure.subplots(high, wide, squeeze=False).flat)
    most = max((one.largest or 1 for one in shown), default=1)
    for axes, group in zip(grid, panels, strict=False):
        axes.set_title(filled(group[0].label(rest), int(12.5 * figure.get_figwidth() / wide)))
        for one in group:
            if BATCH_SIZE in (rows, columns):
                for size in one.records.keys() & {*xs, *ys}:
                    x, y = (size if axis == BATCH_SIZE else one.value(axis) for axis in (columns, rows))
                    _draw_cell(axes, xs.index(x), ys.index(y), one, size)
            else:
                _draw_limit(axes, xs.index(one.value(columns)), ys.index(one.value(rows)), one, most)
        _frame_cells(axes, [axis_cell(columns, x) for x in xs], labels)
        axes.set_xlabel(axis_name(columns))
        axes.set_ylabel(axis_name(rows))
    for empty in grid[len(panels) :]:
        empty.set_axis_off()
    if BATCH_SIZE in (rows, columns):
        notes, scale, label = [CELL_NOTE], Normalize(0, 1), "reserved, part of capacity"
    else:
        notes, scale, label = [LIMIT_NOTE], Normalize(0, most), f"largest {series[0].size_name} that fits"
    if len(groups) > len(panels):
        notes.append(f"the first {len(panels)} of {len(groups)} maps; --where narrows them")
    figure.colorbar(mpl.cm.ScalarMappable(scale, COLOURS), ax=grid, label=label, fraction=0.04)
    return framed(figure, series, analysis.settings(series), [], [*notes, *analysis.caveats(series)])


CELL_NOTE = "number: GiB reserved; lighter is fuller; hatched: out of memory; in brackets: runs, too slow to use"
LIMIT_NOTE = "number: largest that fits; +: the next one was not tried; hatched: nothing fits"


def _sizes(series: Group) -> list[int]:
    """The batch sizes to show; of many some, with the ends of the series, which are what is looked for."""
    sizes = sorted({size for one in series for size in one.records if size <= one.last_telling})
    if len(sizes) <= MOST_COLUMNS:
        return sizes
    ends = {size for one in series for size in (one.largest, one.first_oom) if size}
    step = math.ceil(len(sizes) / MOST_COLUMNS)
    return [size for i, size in enumerate(sizes) if i % step == 0 or size in ends][: 2 * MOST_COLUMNS]


def _values(series: Group, axis: str) -> list[object]:
    if axis == BATCH_SIZE:
        return [*_sizes(series)]
    return analysis.ordered(dict.fromkeys(one.value(axis) for one in series))


def _draw_cell(axes: Axes, x: int, y: int, one: Series, size: int) -> None:
    record = one.records.get(size)
    if record is None or size > one.last_telling:
        return
    share, text = _fullness(one, record)
    gid = f"cell {record.status.value} {size} {one.series_id}"
    _box(axes, x, y, share, text, hatched=record.status is Status.OOM, gid=gid)


def _draw_limit(axes: Axes, x: int, y: int, one: Series, most: int) -> None:
    end = one.ended_by
    text = {Status.OOM: "none", Status.THRASHING: "none", Status.UNSUPPORTED: "no"}.get(end.status, "?") if end else "?"
    if one.largest is not None:
        text = f"{one.largest}" if one.bounded else f"{one.largest}+"
    share = None if one.largest is None else one.largest / most
    _box(axes, x, y, share, text, hatched=text == "none", gid=f"limit {text} {one.series_id}")


def _box(axes: Axes, x: int, y: int, share: float | None, text: str, *, hatched: bool, gid: str) -> None:
    face = "#dddddd" if share is None else COLOURS(share)
    box: dict[str, Any] = {"facecolor": face, "edgecolor": "white", "hatch": "////" if hatched else None, "gid": gid}
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **box))
    dark = share is not None and share < 0.55
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else BLACK)


def _frame_cells(axes: Axes, columns: list[str], rows: list[str]) -> None:
    axes.grid(visible=False)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)


def _fullness(one: Series, record: CellRecord) -> tuple[float | None, str]:
    rank = record.largest_rank
    if record.status not in (Status.OK, Status.THRASHING) or rank is None or rank.reserved_peak_bytes is None:
        words = {Status.OOM: "OOM", Status.UNSUPPORTED: "no", Status.HOST_OOM: "host"}
        return None, words.get(record.status, "failed")
    text = f"{rank.reserved_peak_bytes / GIB:.3g}"
    share = min(1.0, rank.reserved_peak_bytes / rank.capacity_bytes)
    return share, f"({text})" if one.size_of(record) in one.thrashing else text
