"""Charts of a sweep, drawn from its records alone: `python -m sweep.plots [results/NAME ...]`.

Per series memory and seconds per iteration against batch size; per axis of the grid a comparison of the
series that differ in nothing else. PNG for reading, SVG for the web, both into plots/<sweep>/. Nothing here
needs torch, and figures are made without pyplot: no global state, no window, nothing to close.
"""

import argparse
import itertools
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sweep import analysis
from sweep.analysis import GIB, Series, axis_label, outcome, varying_axes
from sweep.record import RankRecord, Status
from sweep.store import Store, StoreError

STYLE: Any = {
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 11,
    "grid.color": "#dddddd",
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text: searchable, and readable by a screen reader
    "svg.hashsalt": "sweep",  # the same records give the same bytes
}
# Okabe and Ito's palette, told apart with any colour vision; yellow is left out, it vanishes in print.
BLUE, VERMILLION, GREEN, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#000000", "#444444"
VALUE_COLOURS = (BLUE, VERMILLION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", BLACK)
VALUE_MARKERS = "os^Dv<>"
CROSS: dict[str, Any] = {"linestyle": "none", "marker": "x", "markersize": 8, "markeredgewidth": 2.2}
CREATOR = "sweep.plots"
MOST_PANELS = 12

Kind = Literal["memory", "time"]
Group = Sequence[Series]


@dataclass(frozen=True, kw_only=True)
class Look:
    colour: str
    marker: str
    label: str
    dashes: Any = "-"
    weight: float = 1.0
    """Thickness: of lines that coincide, the one drawn first shows at the edges of the other."""

    @property
    def style(self) -> dict[str, Any]:
        size = {"markersize": 5 * self.weight, "linewidth": 1.6 * self.weight}
        return {"color": self.colour, "marker": self.marker, **size}

    @property
    def key(self) -> Line2D:
        return Line2D([], [], label=self.label, linestyle=self.dashes, **replace(self, weight=1.0).style)


OOM_KEY: dict[str, Any] = {"color": BLACK, "label": "out of memory", **CROSS}
THRASHING_KEY: dict[str, Any] = {
    "color": GREY, "marker": "o", "markerfacecolor": "white", "linestyle": "none",
    "label": "thrashing: runs, too slow to use",
}  # fmt: skip


def draw(store: Store, out: Path) -> list[Path]:
    """Draw every chart of a sweep into `out`; the paths written. Charts of an earlier drawing are removed."""
    written: list[Path] = []
    with mpl.rc_context(STYLE):
        for name, figure in _figures([one for one in analysis.series_of(store.records()) if _drawable(one)]):
            png, svg = out / f"{name}.png", out / f"{name}.svg"
            out.mkdir(parents=True, exist_ok=True)
            figure.savefig(png, metadata={"Software": CREATOR})
            figure.set_layout_engine("none")  # keep the layout: finding it takes longer than drawing
            figure.savefig(svg, metadata={"Creator": CREATOR, "Date": None})
            written += [png, svg]
    for svg in out.glob("*.svg"):
        if svg not in written and f">{CREATOR}<" in svg.read_text(encoding="utf-8"):
            svg.unlink()
            svg.with_suffix(".png").unlink(missing_ok=True)
    return written


def _drawable(one: Series) -> bool:
    """Whether there is anything to see: a crash or a refusal alone belongs in the report."""
    return bool(one.measured) or any(r.status is Status.OOM for r in one.records.values())


def _figures(series: Group) -> Iterator[tuple[str, Figure]]:
    varying = varying_axes(series)
    names = [_file_name(one.label(varying) or one.label(("model", "engine"))) for one in series]
    for name, one in zip(names, series, strict=True):
        yield name if names.count(name) == 1 else f"{name}_{one.series_id}", series_figure(one)
    kinds: tuple[Kind, ...] = ("memory", "time")
    for axis in varying:
        for kind in kinds:
            panels = [
                g for g in analysis.groups(series, axis) if kind == "memory" or any(s.time_is_measured for s in g)
            ]
            pages = [panels[i : i + MOST_PANELS] for i in range(0, len(panels), MOST_PANELS)]
            for number, page in enumerate(pages, start=1):
                suffix = f"-{number}" if len(pages) > 1 else ""
                yield f"compare-{_file_name(axis)}-{kind}{suffix}", comparison(page, axis, kind)


def _file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9_.-]+", "-", text.lower().replace(", ", "_"))[:120]


def series_figure(one: Series) -> Figure:
    """Memory, and seconds per iteration where they were measured, against batch size."""
    figure = Figure(figsize=(8, 5.4))
    axes = figure.subplots()
    reserved, allocated = _memory_labels(one)
    looks = (
        Look(colour=BLUE, marker="o", label=reserved),
        Look(colour=GREEN, marker="s", label=allocated, dashes="--"),
    )
    _memory(axes, one, *looks)
    _capacity(axes, [one])
    _memory_limits(axes, [one])
    ticks = _batch_axis(axes, [one], most=16)
    if one.spec.world_size * one.spec.accumulation > 1:
        _overall_axis(axes, one, ticks)
    axes.set_xlabel("batch size per device")
    axes.set_ylabel("memory per device, peak (GiB)")
    oom = _oom_marks(axes, one, BLACK, Counter())
    _ending(axes, one)
    handles: list[Any] = [look.key for look in looks] if one.measured else []
    ranks = max((len(r.ranks) for r in one.measured), default=1)
    if ranks > 1:
        handles.append(Patch(color="#888888", alpha=0.35, label=f"smallest to largest of {ranks} ranks"))
    if one.time_is_measured:
        handles.append(_time_axis(axes, one))
    figure.suptitle(_title([one], analysis.settings([one])), x=0.01, ha="left")
    _legend(figure, [*handles, *_mark_keys([one], oom)], [analysis.row_of(one, ()).answer, *analysis.caveats([one])])
    return figure


def comparison(panels: Sequence[Group], axis: str, kind: Kind) -> Figure:
    """A panel per group of series that differ in `axis` alone. Memory: reserved solid, allocated dashed."""
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 8 else 3
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8, 5.4) if len(panels) == 1 else (4.2 * columns, 2.5 * rows + 1.6))
    grid: list[Axes] = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    every = [one for group in panels for one in group]
    looks = _looks(every, axis)
    apart = [name for name in varying_axes(every) if name != axis]
    oom = False
    for axes, group in zip(grid, panels, strict=False):
        title = textwrap.fill(group[0].label(apart), int(12 * figure.get_figwidth() / columns))
        axes.set_title(title)
        marked: Counter[int] = Counter()
        for one in group:
            look = looks[one.value(axis)]
            if kind == "time":
                _times(axes, one, look)
                continue
            _memory(axes, one, look, replace(look, dashes="--"))
            oom |= _oom_marks(axes, one, look.colour, marked)
        if kind == "memory":
            _capacity(axes, group, {one.series_id: looks[one.value(axis)].colour for one in group})
            if not any(one.measured for one in group):
                _say(axes, "nothing fits")
    for empty in grid[len(panels) :]:
        empty.set_axis_off()
    for axes in grid[::columns]:
        axes.set_ylabel("peak per device (GiB)" if kind == "memory" else "seconds per iteration (s)")
    _shared_batch_axis(grid, every, columns, len(panels))
    keys = [look.key for look in looks.values()]
    if kind == "memory":
        _memory_limits(grid[0], every)
        solid, dashed = _memory_labels(every[0])
        keys.append(Line2D([], [], color=GREY, label=solid))
        keys.append(Line2D([], [], color=GREY, label=dashed, linestyle="--"))
    else:
        grid[0].set_ylim(0, 1.1 * max(axes.dataLim.y1 for axes in grid[: len(panels)]))
    yes = axis_label(axis, True)
    what = (
        f"without and with {yes}"
        if isinstance(every[0].value(axis), bool)
        else " vs ".join(look.label for look in looks.values())
    )
    second = "; ".join(text for text in (what, analysis.settings(every)) if text)
    figure.suptitle(_title(every, second, figure.get_figwidth()), x=0.01, ha="left")
    untimed = sum(not one.time_is_measured for one in every)
    notes = analysis.caveats(every)
    if kind == "time" and untimed:
        notes = [f"time was not measured in {untimed} of these {len(every)} series"]
    _legend(figure, [*keys, *_mark_keys(every, oom)], notes)
    return figure


def _title(series: Group, second: str, width: float = 8.0) -> str:
    return "\n".join(textwrap.fill(text, int(width * 12)) for text in (analysis.headline(series), second) if text)


def _looks(series: Group, axis: str) -> dict[object, Look]:
    values = list(dict.fromkeys(one.value(axis) for one in series))
    return {
        value: Look(
            colour=VALUE_COLOURS[i % len(VALUE_COLOURS)],
            marker=VALUE_MARKERS[i % len(VALUE_MARKERS)],
            label=axis_label(axis, value) or str(value),
            weight=1.5 - 0.5 * i / max(1, len(values) - 1),
        )
        for i, value in enumerate(values)
    }


def _memory_labels(one: Series) -> tuple[str, str]:
    return ("mapped address space (limit counted)", "resident") if one.is_cpu else ("reserved", "allocated")


def _memory(axes: Axes, one: Series, reserved: Look, allocated: Look) -> None:
    """Lines of the headline rank, and a band from the smallest to the largest rank."""
    points = {r.spec.batch_size: r for r in one.measured}
    readings: tuple[tuple[str, Look, Callable[[RankRecord], int | None]], ...] = (
        ("reserved", reserved, lambda rank: rank.reserved_peak_bytes),
        ("allocated", allocated, lambda rank: rank.allocated_peak_bytes),
    )
    for name, look, read in readings:
        line, low, high = {}, {}, {}
        for size, record in points.items():
            found = [value / GIB for rank in record.ranks if (value := read(rank)) is not None]
            low[size], high[size] = min(found), max(found)
            rank = record.largest_rank
            line[size] = (read(rank) or 0) / GIB if rank else math.nan
        sizes = _line(axes, one, line, look, name)
        if any(len(r.ranks) > 1 for r in points.values()):
            lower, upper = ([side.get(size, math.nan) for size in sizes] for side in (low, high))
            axes.fill_between(sizes, lower, upper, color=look.colour, alpha=0.22, linewidth=0)
            # A band has no width at a lone point.
            axes.vlines(list(low), list(low.values()), list(high.values()), look.colour, alpha=0.22, linewidth=3)


def _line(axes: Axes, one: Series, values: Mapping[int, float], look: Look, name: str) -> list[int]:
    """A line, broken at sizes that did not run; open markers where they ran badly. The sizes on its way."""
    sizes = [size for size in one.records if size <= max(values, default=0)]
    along = [values.get(size, math.nan) for size in sizes]
    axes.plot(sizes, along, linestyle=look.dashes, gid=f"{name} {one.series_id}", **look.style)
    bad = [size for size in values if one.records[size].status is Status.THRASHING]
    style = look.style | {"markerfacecolor": "white", "linestyle": "none"}
    if bad:
        axes.plot(bad, [values[b] for b in bad], zorder=3, gid=f"thrashing {name} {one.series_id}", **style)
    return sizes


def _times(axes: Axes, one: Series, look: Look) -> None:
    """Median of the measured iterations, with a bar from the fastest to the slowest."""
    timed = {r.spec.batch_size: r for r in one.measured if r.time_is_measured}
    _line(axes, one, {size: r.seconds_per_iteration or 0 for size, r in timed.items()}, look, "seconds")
    spans = [r.iteration_seconds or () for r in timed.values()]
    axes.vlines(list(timed), [min(t) for t in spans], [max(t) for t in spans], colors=look.colour, alpha=0.6)


def _time_axis(axes: Axes, one: Series) -> Line2D:
    look = Look(colour=VERMILLION, marker="^", dashes="-.", label="seconds per iteration (right axis)")
    right = axes.twinx()
    _times(right, one, look)
    right.set_ylim(0, 1.25 * right.dataLim.y1)
    right.set_ylabel("seconds per iteration (s)", color=VERMILLION)
    right.tick_params(axis="y", colors=VERMILLION)
    right.grid(visible=False)
    return look.key


def _capacity(axes: Axes, group: Group, colours: Mapping[str, str] | None = None) -> None:
    """The device's capacity as a labelled line, coloured where it differs within the group."""
    capacities = {one.capacity_bytes: one for one in group if one.capacity_bytes}
    for size, one in capacities.items():
        colour = colours[one.series_id] if colours and len(capacities) > 1 else BLACK
        axes.axhline(size / GIB, color=colour, linewidth=1, gid="capacity")
        text = f"{'limit' if one.is_cpu else 'capacity'} {analysis.size_text(size)}"
        place: dict[str, Any] = {"xy": (0.01, size / GIB), "xytext": (0, 5), "va": "bottom"}
        if colours:  # beside the panel, for marks of several series are stacked on the line
            text, place = (
                text.replace(" ", "\n", 1),
                {"xy": (1, size / GIB), "xytext": (4, 0), "va": "center"},
            )
        place |= {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
        axes.annotate(text, **place, color=colour, fontsize=8, annotation_clip=False)


def _memory_limits(axes: Axes, series: Group) -> None:
    tops = [one.capacity_bytes or 0 for one in series]
    tops += [rank.reserved_peak_bytes or 0 for one in series for r in one.measured for rank in r.ranks]
    axes.set_ylim(0, 1.12 * max(tops) / GIB or 1)


def _first_oom(one: Series) -> int | None:
    """The smallest size above the largest usable one that ran out of memory."""
    above = (s for s, r in one.records.items() if s > (one.largest or 0) and r.status is Status.OOM)
    return next(above, None)


def _last_shown(one: Series) -> int:
    """What a search tried beyond the first size that does not fit adds nothing."""
    end = one.ended_by
    return _first_oom(one) or max(one.largest or 0, end.spec.batch_size if end else 0)


def _batch_axis(axes: Axes, series: Group, most: int) -> list[int]:
    """Limits and whole-numbered ticks, at most so many; no tick beyond the largest size that was tried."""
    low, high = min(next(iter(one.records)) for one in series), max(map(_last_shown, series))
    room = max(0.6, 0.09 * (high - low)) if any(map(_first_oom, series)) else 0.5
    axes.set_xlim(low - 0.5, high + room)
    steps = (base * 10**power for power in range(6) for base in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step < most)
    ticks = sorted({low, *range(step * math.ceil(low / step), high + 1, step)})
    axes.set_xticks(ticks)
    return ticks


def _overall_axis(axes: Axes, one: Series, ticks: Sequence[int]) -> None:
    world, accumulation = one.spec.world_size, one.spec.accumulation
    top = axes.secondary_xaxis("top")
    top.set_xticks(ticks, [str(world * tick) for tick in ticks])
    text = f"overall batch size (x {world} devices)"
    top.set_xlabel(text + (f"; an optimizer step takes {accumulation} of them" if accumulation > 1 else ""))


def _shared_batch_axis(grid: Sequence[Axes], series: Group, columns: int, used: int) -> None:
    ticks = _batch_axis(grid[0], series, most=16 if columns == 1 else 9)
    worlds = {one.spec.world_size for one in series}
    label = "batch size per device"
    if worlds != {1} and len(worlds) == 1:
        world = worlds.pop()
        grid[0].set_xticks(ticks, [f"{tick}\n{world * tick}" for tick in ticks])
        label += f"\nsecond line: overall (x {world} devices)"
    for axes in grid[max(0, used - columns) : used]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(label)


def _oom_marks(axes: Axes, one: Series, colour: str, marked: Counter[int]) -> bool:
    """Crosses on the capacity line where memory ran out, stacked at one size. Whether there are any."""
    sizes = [r.spec.batch_size for r in one.surprises if r.status is Status.OOM]
    sizes += [first] if (first := _first_oom(one)) else []
    base = (one.capacity_bytes or axes.dataLim.y1 * GIB) / GIB
    heights = [base * (1 + 0.05 * marked[size]) for size in sizes]
    marked.update(sizes)
    axes.plot(sizes, heights, color=colour, zorder=4, gid=f"oom {one.series_id}", **CROSS)
    return bool(sizes)


def _ending(axes: Axes, one: Series) -> None:
    """What stopped the walk: the region of sizes that do not fit, or a dotted line where a cell broke."""
    first, right = _first_oom(one), axes.get_xlim()[1]
    if first is not None:
        axes.axvspan(first, right, color="#999999", alpha=0.25, linewidth=0, gid="oom region")
        what = outcome(one.records[first])
        if one.measured:
            _say(
                axes,
                what.split(",")[0],
                x=(first + right) / 2,
                rotation=90,
                transform=axes.get_xaxis_transform(),
            )
        else:
            _say(axes, f"nothing fits\n{what}\nat batch size {first}")
    for size, record in one.records.items():
        if record.status not in (Status.OK, Status.THRASHING, Status.OOM) and size < right:
            axes.axvline(size, color="#666666", linestyle=":", linewidth=1.2, gid="broken")
            words = record.status.value.replace("_", " ")
            _say(axes, words, x=size, rotation=90, transform=axes.get_xaxis_transform())


def _say(axes: Axes, text: str, x: float = 0.5, **place: Any) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
    style: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center", "fontsize": 9}
    axes.text(x, 0.45, text, bbox=box, **style | place)


def _mark_keys(series: Group, oom: bool) -> list[Line2D]:
    thrashing = any(r.status is Status.THRASHING for one in series for r in one.measured)
    return [Line2D([], [], **OOM_KEY)] * oom + [Line2D([], [], **THRASHING_KEY)] * thrashing


def _legend(figure: Figure, handles: Sequence[Any], notes: Sequence[str]) -> None:
    """Below the axes, where it hides nothing, in as many columns as fit; the notes stand over it."""
    width = figure.get_figwidth()
    labels = [str(handle.get_label()) for handle in handles]

    def inches(columns: int) -> float:
        rows, longer = divmod(len(labels), columns)
        starts = [i * rows + min(i, longer) for i in range(columns + 1)]
        return sum(0.65 + 0.073 * max(map(len, labels[a:b])) for a, b in itertools.pairwise(starts))

    columns = next((n for n in (4, 3, 2) if n <= len(labels) and inches(n) < width), 1)
    title = "\n".join(textwrap.fill(note, int(14 * width)) for note in notes) or None
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, title=title, alignment="left")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sweep.plots", description="Draw the charts of a sweep.")
    parser.add_argument("results", nargs="*", type=Path, help="folders of results; default: all of them")
    parser.add_argument("--out", type=Path, default=Path("plots"), help="where plots/<sweep>/ goes")
    options = parser.parse_args(arguments)
    try:
        stores = analysis.stores_with_results(options.results)
    except StoreError as error:
        print(error, file=sys.stderr)
        return 1
    return max(_redraw(store, options.out / store.name) for store in stores)


def _redraw(store: Store, out: Path) -> int:
    try:
        written = draw(store, out)
    except (StoreError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if not written:
        print(f"{store.path} holds no measured cell; see python -m sweep.report {store.path}", file=sys.stderr)
        return 1
    print(f"{out}: {len(written) // 2} charts, each as PNG and SVG")
    return 0


if __name__ == "__main__":
    sys.exit(main())
