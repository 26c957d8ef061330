"""What is drawn into one pair of axes: memory, time, capacity, where it ran out, batch sizes."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sweep import analysis
from sweep.analysis import GIB, Series, outcome, timing_of
from sweep.plots.style import BLACK, CROSS, ESTIMATED, VERMILLION, Group, Look, say, time_label
from sweep.record import Status


def memory(axes: Axes, one: Series, reserved: Look, allocated: Look) -> None:
    """Lines of the headline rank, and a band from the smallest to the largest rank."""
    for name, look in (("reserved", reserved), (one.used, allocated)):
        gib = {
            one.size_of(r): [(getattr(rank, f"{name}_peak_bytes") or math.nan) / GIB for rank in r.ranks]
            for r in one.measured
        }
        headline = {one.size_of(r): r.ranks.index(rank) for r in one.measured if (rank := r.largest_rank)}
        sizes = line(axes, one, {size: gib[size][rank] for size, rank in headline.items()}, look, name)
        if any(len(values) > 1 for values in gib.values()):
            low, high = ([pick(gib.get(size, [math.nan])) for size in sizes] for pick in (min, max))
            # The edge makes a point without neighbours visible, where a band has no width.
            axes.fill_between(sizes, low, high, color=look.colour, alpha=0.2, linewidth=2)


def line(axes: Axes, one: Series, values: Mapping[int, float], look: Look, name: str) -> list[int]:
    """A line, broken at sizes that did not run; open markers where they ran badly. The sizes on its way."""
    sizes = [size for size in one.records if size <= max(values, default=0)]
    along = [values.get(size, math.nan) for size in sizes]
    axes.plot(sizes, along, linestyle=look.dashes, gid=f"{name} {one.series_id}", **look.style)
    bad = [size for size in values if size in one.thrashing]
    style = look.style | {"markerfacecolor": "white", "linestyle": "none"}
    if bad:
        axes.plot(bad, [values[b] for b in bad], zorder=3, gid=f"thrashing {name} {one.series_id}", **style)
    return sizes


def times(axes: Axes, one: Series, look: Look) -> None:
    """Median of the measured iterations, with a bar from the fastest to the slowest; estimates dashed, without bars."""
    timed = {one.size_of(r): timing for r in one.measured if (timing := timing_of(r))}
    seconds = {size: timing.seconds for size, timing in timed.items()}
    if one.time_is_estimated:
        line(axes, one, seconds, replace(look, dashes=ESTIMATED), "estimated-seconds")
        return
    line(axes, one, seconds, look, "seconds")
    fastest = [timing.fastest_seconds for timing in timed.values()]
    slowest = [timing.slowest_seconds for timing in timed.values()]
    axes.vlines(list(timed), fastest, slowest, colors=look.colour, alpha=0.6)


def time_reference(axes: Axes, one: Series, look: Look) -> Line2D | None:
    """The best seconds per sample of this series, carried to every batch size; its key."""
    best = one.fastest
    timing = timing_of(best) if best else None
    if best is None or timing is None:
        return None
    end = axes.get_xlim()[1]
    slope = timing.seconds / one.size_of(best)
    style: dict[str, Any] = {"color": look.colour, "linestyle": ":", "linewidth": 1.6}
    axes.plot([0, end], [0, slope * end], gid=f"reference {one.series_id}", zorder=1.5, scalex=False, **style)
    return Line2D(
        [], [], label=f"{look.label}: as fast per {'token' if one.fixed_size else 'sample'} as its best", **style
    )


def memory_reference(axes: Axes, one: Series, look: Look) -> Line2D | None:
    """What the best point of this series reserved, across all batch sizes; its key."""
    best = one.fastest or one.best
    rank = best.largest_rank if best else None
    if rank is None or rank.reserved_peak_bytes is None:
        return None
    style: dict[str, Any] = {"color": look.colour, "linestyle": ":", "linewidth": 1.6}
    axes.axhline(rank.reserved_peak_bytes / GIB, gid=f"reference {one.series_id}", zorder=1.5, **style)
    return Line2D([], [], label=f"{look.label}: {'reserved at its best' if not one.is_cpu else 'at its best'}", **style)


def time_axis(axes: Axes, one: Series) -> Line2D:
    estimated = one.time_is_estimated
    dashes, what = (ESTIMATED, "seconds per iteration, estimated") if estimated else ("-.", "seconds per iteration")
    look = Look(colour=VERMILLION, marker="^", dashes=dashes, label=f"{what} (right axis)")
    right = axes.twinx()
    times(right, one, look)
    right.set_ylim(0, 1.25 * right.dataLim.y1)
    right.set_ylabel(time_label("seconds per iteration (s)", [one]), color=VERMILLION)
    right.tick_params(axis="y", colors=VERMILLION)
    right.grid(visible=False)
    return look.key


def capacity(axes: Axes, group: Group, colours: Sequence[str] = ()) -> None:
    """The device's capacity as a labelled line, coloured where it differs within the group."""
    capacities = {one.capacity_bytes: i for i, one in enumerate(group) if one.capacity_bytes}
    for size, i in capacities.items():
        colour = colours[i] if len(capacities) > 1 else BLACK
        axes.axhline(size / GIB, color=colour, linewidth=1, gid="capacity")
    clusters: list[list[int]] = []
    for size in sorted(capacities):  # lines too close for a label each share one
        if clusters and size - clusters[-1][0] < 0.09 * max(capacities):
            clusters[-1].append(size)
        else:
            clusters.append([size])
    for sizes in clusters:
        low, high = analysis.size_text(sizes[0]), analysis.size_text(sizes[-1])
        text = high if low == high else f"{low.removesuffix(' GiB')} to {high}"
        if len(clusters) < 3:
            text = f"{'limit' if group[0].is_cpu else 'capacity'} {text}"
        x, offset, where = 0.01, (0, 5), "bottom"
        if colours:  # beside the panel, for marks of several series are stacked on the line
            x, offset, where = 1, (4, 0), "center"
            text = text.replace(" ", "\n", 1) if len(clusters) < 3 else text
        colour = colours[capacities[sizes[0]]] if len(capacities) > 1 and len(sizes) == 1 else BLACK
        place: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": where}
        at = (x, (sizes[0] + sizes[-1]) / 2 / GIB)
        axes.annotate(text, at, offset, **place, color=colour, fontsize=8, annotation_clip=False)


def highest_bytes(one: Series) -> int:
    ranks = (rank for record in one.measured for rank in record.ranks)
    return max(one.capacity_bytes or 0, *(rank.reserved_peak_bytes or 0 for rank in ranks), 0) or GIB


def memory_limits(axes: Axes, series: Group) -> None:
    lines = (line for panel in axes.get_shared_y_axes().get_siblings(axes) for line in panel.get_lines())
    highest = max(
        (line.get_ydata().max(initial=0) for line in lines if str(line.get_gid()).startswith("oom ")), default=0
    )
    axes.set_ylim(0, max(1.12 * max(map(highest_bytes, series)) / GIB, 1.03 * highest))
    if not any(one.capacity_bytes or one.measured for one in series):
        axes.set_yticks([])  # nothing gives the axis a scale


def batch_axis(axes: Axes, series: Group, most: int) -> list[int]:
    """Limits and whole-numbered ticks, at most so many; no tick beyond the largest size that was tried."""
    low, high = min(next(iter(one.records)) for one in series), max(one.last_telling for one in series)
    room = max(0.6, 0.09 * (high - low)) if any(one.first_oom for one in series) else 0.5
    unit = min(one.step for one in series)
    axes.set_xlim(low - 0.5 * unit, high + room * (1 if unit == 1 else 2))
    steps = (unit * base * 10**power for power in range(6) for base in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step < most)
    ticks = sorted({low, *range(step * math.ceil(low / step), high + 1, step)})
    axes.set_xticks(ticks)
    return ticks


def overall_axis(axes: Axes, one: Series, ticks: Sequence[int]) -> None:
    world, accumulation = one.spec.data_parallel_size, one.spec.accumulation
    if world * accumulation == 1 or one.fixed_size:
        return
    top = axes.secondary_xaxis("top")
    top.set_xticks(ticks, [str(world * tick) for tick in ticks])
    steps = f"; an optimizer step takes {accumulation} of them" if accumulation > 1 else ""
    top.set_xlabel(f"overall batch size (x {world} device{'s' if world > 1 else ''}){steps}")


def shared_batch_axis(grid: Sequence[Axes], series: Group, columns: int, used: int) -> None:
    ticks = batch_axis(grid[0], series, most=16 if columns == 1 else 9)
    worlds = {one.spec.data_parallel_size for one in series}
    label = series[0].size_label
    if series[0].fixed_size:
        worlds = {1}  # sequences have no length over all devices
    if worlds != {1} and len(worlds) == 1:
        world = worlds.pop()
        grid[0].set_xticks(ticks, [f"{tick}\n{world * tick}" for tick in ticks])
        label += f"\nsecond line: overall (x {world} devices)"
    for axes in grid[max(0, used - columns) : used]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(label)


def oom_marks(axes: Axes, one: Series, colour: str, marked: Counter[int], gap: float = 0.05) -> bool:
    """Crosses on the capacity line where memory ran out, stacked at one size. Whether there are any."""
    sizes = [one.size_of(r) for r in one.surprises if r.status is Status.OOM]
    sizes += [first] if (first := one.first_oom) else []
    base = (one.capacity_bytes or highest_bytes(one)) / GIB
    heights = [base * (1 + gap * marked[size]) for size in sizes]
    marked.update(sizes)
    axes.plot(sizes, heights, color=colour, zorder=4, gid=f"oom {one.series_id}", **CROSS)
    return bool(sizes)


def ending(axes: Axes, one: Series) -> None:
    """What stopped the walk: the region of sizes that do not fit, or a dotted line where a cell broke."""
    first, right = one.first_oom, axes.get_xlim()[1]
    if first is not None:
        axes.axvspan(first, right, color="#999999", alpha=0.25, linewidth=0, gid="oom region")
        what = outcome(one.records[first])
        if one.measured:
            say(axes, what.split(",")[0], upright_at=(first + right) / 2)
        else:
            say(axes, f"nothing fits\n{what}\nat {one.size_name} {first}")
    for size, record in one.records.items():
        if record.status not in (Status.OK, Status.THRASHING, Status.OOM) and size < right:
            axes.axvline(size, color="#666666", linestyle=":", linewidth=1.2, gid="broken")
            say(axes, record.status.value.replace("_", " "), upright_at=size)
