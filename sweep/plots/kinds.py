"""The charts against batch size: one series, and the series that differ in one axis."""

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sweep import analysis
from sweep.analysis import Series, axis_label, varying_axes
from sweep.plots.panels import (
    batch_axis,
    capacity,
    ending,
    memory,
    memory_limits,
    memory_reference,
    oom_marks,
    overall_axis,
    shared_batch_axis,
    time_axis,
    time_reference,
    times,
)
from sweep.plots.style import (
    BLACK,
    BLUE,
    ESTIMATED,
    GREEN,
    GREY,
    Group,
    Look,
    estimated_key,
    filled,
    framed,
    looks_of,
    mark_keys,
    memory_labels,
    say,
    time_label,
)


def series_figure(one: Series) -> Figure:
    """Memory, and seconds per iteration where they were measured, against batch size."""
    figure = Figure(figsize=(8, 5.4))
    axes = figure.subplots()
    solid = Look(colour=BLUE, marker="o", label=memory_labels(one)[0])
    dashed = Look(colour=GREEN, marker="s", label=memory_labels(one)[1], dashes="--")
    memory(axes, one, solid, dashed)
    capacity(axes, [one])
    memory_limits(axes, [one])
    overall_axis(axes, one, batch_axis(axes, [one], most=16))
    axes.set_xlabel(one.size_label)
    axes.set_ylabel("memory per device, peak (GiB)")
    oom = oom_marks(axes, one, BLACK, Counter())
    ending(axes, one)
    handles: list[Any] = [solid.key, dashed.key] if one.measured else []
    if one.is_timed:
        handles.append(time_axis(axes, one))
    handles += mark_keys([one], oom, band=True)
    notes = [analysis.row_of(one, ()).answer, *analysis.caveats([one])]
    return framed(figure, [one], analysis.settings([one]), handles, notes)


def comparison(panels: Sequence[Group], axis: str, *, timed: bool) -> Figure:
    """Seconds or memory; a panel per group of series that differ in `axis` alone.

    A dotted line is the first series' best point: of memory, what it took; of time, its seconds per sample carried to
    every batch size, so that a point below the line is work done in less time.
    """
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 8 else 3
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8, 5.4) if len(panels) == 1 else (4.2 * columns, 2.5 * rows + (2.3 if timed else 1.6)))
    grid: list[Axes] = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    every = [one for group in panels for one in group]
    looks = looks_of(every, axis)
    apart = [name for name in varying_axes(every) if name != axis]
    oom = False
    for axes, group in zip(grid, panels, strict=False):
        axes.set_title(filled(group[0].label(apart), int(12.5 * figure.get_figwidth() / columns)))
        marked: Counter[int] = Counter()
        for one in group:
            look = looks[one.value(axis)]
            if timed:
                times(axes, one, look)
                continue
            memory(axes, one, look, replace(look, dashes="--", half=True))
            oom |= oom_marks(axes, one, look.colour, marked, gap=min(0.05, 0.3 / len(group)))
        if not timed:
            capacity(axes, group, [looks[one.value(axis)].colour for one in group])
            if not any(one.measured for one in group):
                say(axes, "nothing fits")
    shared_batch_axis(grid, every, columns, len(panels))  # a reference runs to the end of the axis
    per_sample = axis not in ("accumulation", "world_size")  # else an iteration is not as many samples
    reference = None
    for axes, group in zip(grid, panels, strict=False):
        if timed and per_sample:
            reference = time_reference(axes, group[0], looks[group[0].value(axis)]) or reference
        elif not timed:
            reference = memory_reference(axes, group[0], looks[group[0].value(axis)]) or reference
    for empty in grid[len(panels) :]:
        empty.set_axis_off()
    for axes in grid[::columns]:
        label = time_label("seconds per iteration (s)", every) if timed else "peak per device (GiB)"
        axes.set_ylabel(label if len(panels) == 1 else textwrap.fill(label, 22))
    guessed = timed and not any(one.time_is_measured for one in every)
    keys = [(replace(look, dashes=ESTIMATED) if guessed else look).key for look in looks.values()]
    keys += [reference] if reference else []
    keys += estimated_key(every) if timed else []
    if not timed:
        memory_limits(grid[0], every)
        solid, dashed = memory_labels(every[0])
        keys.append(Look(colour=GREY, marker="o", label=solid).key)
        keys.append(Look(colour=GREY, marker="o", label=dashed, dashes="--", half=True).key)
    else:
        grid[0].set_ylim(0, 1.1 * max(axes.dataLim.y1 for axes in grid[: len(panels)]))
    what = " vs ".join(look.label for look in looks.values()) if len(looks) < 4 else f"by {analysis.axis_name(axis)}"
    if isinstance(every[0].value(axis), bool):
        what = f"without and with {axis_label(axis, True)}"
    second = "; ".join(text for text in (what, analysis.settings(every)) if text)
    notes = [*analysis.verdicts(panels, axis)] if timed and per_sample else []
    if not timed and len(panels) <= 2:
        names = [f"{label}: " if (label := group[0].label(apart)) else "" for group in panels]
        notes += [name + analysis.limits(group, axis) for name, group in zip(names, panels, strict=True)]
    notes += analysis.caveats(every, timed=timed)
    if timed and (untimed := sum(not one.is_timed for one in every)):
        notes.append(f"{untimed} of these {len(every)} series without a time")
    return framed(figure, every, second, [*keys, *mark_keys(every, oom, band=not timed)], notes)
