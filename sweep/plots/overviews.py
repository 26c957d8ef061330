"""The charts over all series at once: throughput against memory, time for some samples; and over the devices of one."""

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sweep import analysis
from sweep.analysis import GIB, Series, timing_of, varying_axes
from sweep.plots.panels import batch_axis, capacity, line, memory_limits
from sweep.plots.style import (
    ESTIMATED,
    GREY,
    VALUE_COLOURS,
    VALUE_MARKERS,
    Group,
    Look,
    estimated_key,
    framed,
    mark_keys,
    name_of,
    time_label,
)

MOST_LINES = len(VALUE_COLOURS)
SAMPLES = 10_000


def _chosen(series: Group) -> tuple[list[Series], list[str]]:
    """As many series as one pair of axes takes: the fastest, in their own order, and a sentence where some are out."""
    timed = [(timing, one) for one in series if one.fastest and (timing := timing_of(one.fastest))]
    best = sorted((timing.samples_per_second for timing, _ in timed), reverse=True)[:MOST_LINES]
    notes = [f"the {len(best)} fastest of {len(timed)} series"] if len(timed) > len(best) else []
    return [one for timing, one in timed if timing.samples_per_second >= best[-1]][:MOST_LINES], notes


def _looks(series: Group, all_series: Group) -> list[Look]:
    varying = varying_axes(all_series)
    return [
        Look(colour=VALUE_COLOURS[i], marker=VALUE_MARKERS[i], label=name_of(one, varying, 95))
        for i, one in enumerate(series)
    ]


def samples_figure(series: Group, samples: int = SAMPLES) -> Figure:
    """Minutes to process a fixed number of samples, against batch size."""
    figure = Figure(figsize=(8, 5.4))
    axes = figure.subplots()
    chosen, notes = _chosen(series)
    looks = _looks(chosen, series)
    for one, look in zip(chosen, looks, strict=True):
        timed = {one.size_of(r): timing for r in one.measured if (timing := timing_of(r))}
        minutes = {size: samples * timing.seconds_per_sample / 60 for size, timing in timed.items()}
        if one.time_is_estimated:
            line(axes, one, minutes, replace(look, dashes=ESTIMATED), "estimated-minutes")
        else:
            line(axes, one, minutes, look, "minutes")
    batch_axis(axes, chosen, most=16)
    axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    axes.set_xlabel(series[0].size_label)
    axes.set_ylabel(time_label(f"minutes for {samples:,} samples", chosen))
    lines = [
        replace(look, dashes=ESTIMATED) if one.time_is_estimated else look
        for one, look in zip(chosen, looks, strict=True)
    ]
    keys = [*(look.key for look in lines), *estimated_key(chosen), *mark_keys(chosen, False, False)]
    return framed(figure, series, analysis.settings(series), keys, [*notes, *analysis.caveats(series)])


def pareto_figure(series: Group) -> Figure:
    """Speed against memory, in tokens where all cells know them; the front is what no other cell beats in both."""
    figure = Figure(figsize=(8, 5.4))
    axes = figure.subplots()
    chosen, notes = _chosen(series)
    looks = _looks(chosen, series)
    found: list[tuple[float, float, int]] = []
    times = [timing_of(record) for one in chosen for record in one.measured]
    unit = "samples" if any(timing and timing.tokens_per_second is None for timing in times) else "tokens"
    for one, look in zip(chosen, looks, strict=True):
        cells = [
            (rank.reserved_peak_bytes / GIB, getattr(timing, f"{unit}_per_second"), one.size_of(record))
            for record in one.measured
            if (timing := timing_of(record)) and (rank := record.largest_rank) and rank.reserved_peak_bytes
        ]
        name = "estimated-speed" if one.time_is_estimated else "speed"
        axes.plot(
            [c[0] for c in cells], [c[1] for c in cells], linestyle="none", gid=f"{name} {one.series_id}", **look.style
        )
        bad = [c for c in cells if c[2] in one.thrashing]
        style = look.style | {"markerfacecolor": "white", "linestyle": "none", "gid": f"thrashing {one.series_id}"}
        axes.plot([c[0] for c in bad], [c[1] for c in bad], **style)
        found += [c for c in cells if c[2] not in one.thrashing]
    front: list[tuple[float, float, int]] = []
    for cell in sorted(found, key=lambda c: (c[0], -c[1])):
        if not front or cell[1] > front[-1][1]:
            front.append(cell)
    edge: dict[str, Any] = {"color": GREY, "linewidth": 1.2, "linestyle": "-"}
    axes.plot([c[0] for c in front], [c[1] for c in front], drawstyle="steps-post", gid="front", zorder=1.5, **edge)
    for gib, rate, size in front:
        axes.annotate(str(size), (gib, rate), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xlim(0, 1.08 * max((c[0] for c in found), default=1))
    axes.set_ylim(0, 1.15 * max((c[1] for c in found), default=1))
    axes.set_xlabel("reserved per device, peak (GiB)")
    axes.set_ylabel(time_label(f"{unit} per second, all devices", chosen))
    axes.yaxis.set_major_formatter("{x:,.0f}" if unit == "tokens" else "{x:,g}")
    keys = [*(look.key for look in looks), Line2D([], [], label=f"Pareto front, with {series[0].size_name}s", **edge)]
    keys += mark_keys(chosen, False, False)
    return framed(figure, series, analysis.settings(series), keys, [*notes, *analysis.caveats(series)])


def devices_figure(one: Series) -> Figure:
    """What each device reserved, against batch size."""
    figure = Figure(figsize=(8, 5.4))
    axes = figure.subplots()
    ranks = sorted({rank.rank for record in one.measured for rank in record.ranks})
    keys = []
    for i, number in enumerate(ranks):
        look = Look(
            colour=VALUE_COLOURS[i % len(VALUE_COLOURS)],
            marker=VALUE_MARKERS[i % len(VALUE_MARKERS)],
            label=f"rank {number}",
            dashes="-" if i < len(VALUE_COLOURS) else "--",
            weight=0.8,
        )
        held = {
            one.size_of(record): rank.reserved_peak_bytes / GIB
            for record in one.measured
            for rank in record.ranks
            if rank.rank == number and rank.reserved_peak_bytes
        }
        axes.plot(
            list(held), list(held.values()), linestyle=look.dashes, gid=f"rank{number} {one.series_id}", **look.style
        )
        keys.append(look.key)
    capacity(axes, [one])
    memory_limits(axes, [one])
    batch_axis(axes, [one], most=16)
    axes.set_xlabel(one.size_label)
    axes.set_ylabel("reserved by each device, peak (GiB)")
    return framed(figure, [one], analysis.settings([one]), keys, analysis.caveats([one]))
