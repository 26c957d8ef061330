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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sweep import analysis
from sweep.analysis import GIB, Series, axis_label, outcome, varying_axes
from sweep.record import Status
from sweep.store import Store, StoreError

STYLE: Any = {
    "figure.constrained_layout.use": True,
    "figure.titlesize": 11,
    "font.family": "DejaVu Sans",
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
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


def draw(store: Store, out: Path) -> list[Path]:
    """Draw every chart of a sweep into `out`; the paths written. Charts of an earlier drawing are removed."""
    written: list[Path] = []
    with mpl.rc_context(STYLE):
        # A crash or a refusal alone gives nothing to see; it belongs in the report.
        for name, figure in _figures([o for o in analysis.series_of(store.records()) if o.measured or o.first_oom]):
            out.mkdir(parents=True, exist_ok=True)
            figure.savefig(png := out / f"{name}.png", metadata={"Software": CREATOR})
            figure.set_layout_engine("none")  # keep the layout: finding it takes longer than drawing
            figure.savefig(svg := out / f"{name}.svg", metadata={"Creator": CREATOR, "Date": None})
            written += [png, svg]
    for svg in out.glob("*.svg"):
        if svg not in written and f">{CREATOR}<" in svg.read_text(encoding="utf-8"):
            svg.unlink()
            svg.with_suffix(".png").unlink(missing_ok=True)
    return written


def _figures(series: Group) -> Iterator[tuple[str, Figure]]:
    varying = varying_axes(series)
    names = [_file_name(one.label(varying) or one.label(("model", "engine"))) for one in series]
    for name, one in zip(names, series, strict=True):
        yield name if names.count(name) == 1 else f"{name}_{one.series_id}", series_figure(one)
    for axis, timed in itertools.product(varying, (False, True)):
        panels = analysis.groups(series, axis)
        if timed:
            panels = [group for group in panels if sum(one.time_is_measured for one in group) > 1]
        pages = [panels[i : i + MOST_PANELS] for i in range(0, len(panels), MOST_PANELS)]
        for number, page in enumerate(pages, start=1):
            name = f"compare-{_file_name(axis)}-{'time' if timed else 'memory'}"
            yield name if len(pages) == 1 else f"{name}-{number}", comparison(page, axis, timed=timed)


def _file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9_.-]+", "-", text.lower().replace(", ", "_"))[:120]


def series_figure(one: Series) -> Figure:
    """Memory, and seconds per iteration where they were measured, against batch size."""
    figure = Figure(figsize=(8, 5.4))
    axes = figure.subplots()
    solid = Look(colour=BLUE, marker="o", label=_memory_labels(one)[0])
    dashed = Look(colour=GREEN, marker="s", label=_memory_labels(one)[1], dashes="--")
    _memory(axes, one, solid, dashed)
    _capacity(axes, [one])
    _memory_limits(axes, [one])
    _overall_axis(axes, one, _batch_axis(axes, [one], most=16))
    axes.set_xlabel("batch size per device")
    axes.set_ylabel("memory per device, peak (GiB)")
    oom = _oom_marks(axes, one, BLACK, Counter())
    _ending(axes, one)
    handles: list[Any] = [solid.key, dashed.key] if one.measured else []
    if one.time_is_measured:
        handles.append(_time_axis(axes, one))
    handles += _mark_keys([one], oom, band=True)
    notes = [analysis.row_of(one, ()).answer, *analysis.caveats([one])]
    return _framed(figure, [one], analysis.settings([one]), handles, notes)


def comparison(panels: Sequence[Group], axis: str, *, timed: bool) -> Figure:
    """Seconds or memory; a panel per group of series that differ in `axis` alone."""
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 8 else 3
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8, 5.4) if len(panels) == 1 else (4.2 * columns, 2.5 * rows + 1.6))
    grid: list[Axes] = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    every = [one for group in panels for one in group]
    looks = _looks(every, axis)
    apart = [name for name in varying_axes(every) if name != axis]
    oom = False
    for axes, group in zip(grid, panels, strict=False):
        axes.set_title(textwrap.fill(group[0].label(apart), int(12.5 * figure.get_figwidth() / columns)))
        marked: Counter[int] = Counter()
        for one in group:
            look = looks[one.value(axis)]
            if timed:
                _times(axes, one, look)
                continue
            _memory(axes, one, look, replace(look, dashes="--"))
            oom |= _oom_marks(axes, one, look.colour, marked, gap=0.1 / len(group))
        if not timed:
            _capacity(axes, group, [looks[one.value(axis)].colour for one in group])
            if not any(one.measured for one in group):
                _say(axes, "nothing fits")
    for empty in grid[len(panels) :]:
        empty.set_axis_off()
    for axes in grid[::columns]:
        axes.set_ylabel("seconds per iteration (s)" if timed else "peak per device (GiB)")
    _shared_batch_axis(grid, every, columns, len(panels))
    keys = [look.key for look in looks.values()]
    if not timed:
        _memory_limits(grid[0], every)
        solid, dashed = _memory_labels(every[0])
        keys += [Line2D([], [], color=GREY, label=solid), Line2D([], [], color=GREY, label=dashed, linestyle="--")]
    else:
        grid[0].set_ylim(0, 1.1 * max(axes.dataLim.y1 for axes in grid[: len(panels)]))
    what = " vs ".join(look.label for look in looks.values()) if len(looks) < 4 else f"by {analysis.axis_name(axis)}"
    if isinstance(every[0].value(axis), bool):
        what = f"without and with {axis_label(axis, True)}"
    second = "; ".join(text for text in (what, analysis.settings(every)) if text)
    notes = [] if timed else analysis.caveats(every)
    if timed and (untimed := sum(not one.time_is_measured for one in every)):
        notes = [f"{untimed} of these {len(every)} series without a measured time"]
    return _framed(figure, every, second, [*keys, *_mark_keys(every, oom, band=not timed)], notes)


def _looks(series: Group, axis: str) -> dict[object, Look]:
    values = list(dict.fromkeys(one.value(axis) for one in series))
    looks = {}
    for i, value in enumerate(values):
        colour, marker = VALUE_COLOURS[i % len(VALUE_COLOURS)], VALUE_MARKERS[i % len(VALUE_MARKERS)]
        weight = 1.5 - 0.5 * i / max(1, len(values) - 1)
        label = axis_label(axis, value) or str(value)
        looks[value] = Look(colour=colour, marker=marker, label=label, weight=weight)
    return looks


def _memory_labels(one: Series) -> tuple[str, str]:
    return ("mapped address space (limit counted)", "resident") if one.is_cpu else ("reserved", "allocated")


def _memory(axes: Axes, one: Series, reserved: Look, allocated: Look) -> None:
    """Lines of the headline rank, and a band from the smallest to the largest rank."""
    for name, look in (("reserved", reserved), ("allocated", allocated)):
        gib = {
            r.spec.batch_size: [(getattr(rank, f"{name}_peak_bytes") or math.nan) / GIB for rank in r.ranks]
            for r in one.measured
        }
        headline = {r.spec.batch_size: r.ranks.index(rank) for r in one.measured if (rank := r.largest_rank)}
        sizes = _line(axes, one, {size: gib[size][rank] for size, rank in headline.items()}, look, name)
        if any(len(values) > 1 for values in gib.values()):
            low, high = ([pick(gib.get(size, [math.nan])) for size in sizes] for pick in (min, max))
            # The edge makes a point without neighbours visible, where a band has no width.
            axes.fill_between(sizes, low, high, color=look.colour, alpha=0.2, linewidth=2)


def _line(axes: Axes, one: Series, values: Mapping[int, float], look: Look, name: str) -> list[int]:
    """A line, broken at sizes that did not run; open markers where they ran badly. The sizes on its way."""
    sizes = [size for size in one.records if size <= max(values, default=0)]
    along = [values.get(size, math.nan) for size in sizes]
    axes.plot(sizes, along, linestyle=look.dashes, gid=f"{name} {one.series_id}", **look.style)
    bad = [size for size in values if size in one.thrashing]
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


def _capacity(axes: Axes, group: Group, colours: Sequence[str] = ()) -> None:
    """The device's capacity as a labelled line, coloured where it differs within the group."""
    capacities = {one.capacity_bytes: i for i, one in enumerate(group) if one.capacity_bytes}
    for size, i in capacities.items():
        colour = colours[i] if len(capacities) > 1 else BLACK
        axes.axhline(size / GIB, color=colour, linewidth=1, gid="capacity")
        text = f"{'limit' if group[i].is_cpu else 'capacity'} {analysis.size_text(size)}"
        x, offset, where = 0.01, (0, 5), "bottom"
        if colours:  # beside the panel, for marks of several series are stacked on the line
            near = [other for other in capacities if 0 < abs(other - size) < 0.1 * max(capacities)]
            x, offset, where = 1, (4, 0), "center" if not near else "bottom" if size > near[0] else "top"
            text = text.replace(" ", "\n", 1)
        place: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": where}
        axes.annotate(text, (x, size / GIB), offset, **place, color=colour, fontsize=8, annotation_clip=False)


def _highest(one: Series) -> int:
    ranks = (rank for record in one.measured for rank in record.ranks)
    return max(one.capacity_bytes or 0, *(rank.reserved_peak_bytes or 0 for rank in ranks), 0) or GIB


def _memory_limits(axes: Axes, series: Group) -> None:
    axes.set_ylim(0, 1.12 * max(map(_highest, series)) / GIB)
    if not any(one.capacity_bytes or one.measured for one in series):
        axes.set_yticks([])  # nothing gives the axis a scale


def _batch_axis(axes: Axes, series: Group, most: int) -> list[int]:
    """Limits and whole-numbered ticks, at most so many; no tick beyond the largest size that was tried."""
    low, high = min(next(iter(one.records)) for one in series), max(one.last_telling for one in series)
    room = max(0.6, 0.09 * (high - low)) if any(one.first_oom for one in series) else 0.5
    axes.set_xlim(low - 0.5, high + room)
    steps = (base * 10**power for power in range(6) for base in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step < most)
    ticks = sorted({low, *range(step * math.ceil(low / step), high + 1, step)})
    axes.set_xticks(ticks)
    return ticks


def _overall_axis(axes: Axes, one: Series, ticks: Sequence[int]) -> None:
    world, accumulation = one.spec.world_size, one.spec.accumulation
    if world * accumulation == 1:
        return
    top = axes.secondary_xaxis("top")
    top.set_xticks(ticks, [str(world * tick) for tick in ticks])
    steps = f"; an optimizer step takes {accumulation} of them" if accumulation > 1 else ""
    top.set_xlabel(f"overall batch size (x {world} device{'s' if world > 1 else ''}){steps}")


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


def _oom_marks(axes: Axes, one: Series, colour: str, marked: Counter[int], gap: float = 0.05) -> bool:
    """Crosses on the capacity line where memory ran out, stacked at one size. Whether there are any."""
    sizes = [r.spec.batch_size for r in one.surprises if r.status is Status.OOM]
    sizes += [first] if (first := one.first_oom) else []
    base = (one.capacity_bytes or _highest(one)) / GIB
    heights = [base * (1 + gap * marked[size]) for size in sizes]
    marked.update(sizes)
    axes.plot(sizes, heights, color=colour, zorder=4, gid=f"oom {one.series_id}", **CROSS)
    return bool(sizes)


def _ending(axes: Axes, one: Series) -> None:
    """What stopped the walk: the region of sizes that do not fit, or a dotted line where a cell broke."""
    first, right = one.first_oom, axes.get_xlim()[1]
    if first is not None:
        axes.axvspan(first, right, color="#999999", alpha=0.25, linewidth=0, gid="oom region")
        what = outcome(one.records[first])
        if one.measured:
            _say(axes, what.split(",")[0], upright_at=(first + right) / 2)
        else:
            _say(axes, f"nothing fits\n{what}\nat batch size {first}")
    for size, record in one.records.items():
        if record.status not in (Status.OK, Status.THRASHING, Status.OOM) and size < right:
            axes.axvline(size, color="#666666", linestyle=":", linewidth=1.2, gid="broken")
            _say(axes, record.status.value.replace("_", " "), upright_at=size)


def _say(axes: Axes, text: str, upright_at: float | None = None) -> None:
    """Words in the middle of the panel, or turned and standing at a batch size."""
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9}
    style["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
    if upright_at is None:
        axes.text(0.5, 0.45, text, transform=axes.transAxes, **style)
    else:
        axes.text(upright_at, 0.45, text, transform=axes.get_xaxis_transform(), rotation=90, **style)


def _mark_keys(series: Group, oom: bool, band: bool) -> list[Any]:
    keys: list[Any] = []
    ranks = max((len(r.ranks) for one in series for r in one.measured), default=1)
    if band and ranks > 1:
        keys.append(Patch(color="#888888", alpha=0.35, label=f"smallest to largest of {ranks} ranks"))
    if oom:
        keys.append(Line2D([], [], color=BLACK, label="out of memory", **CROSS))
    if any(one.thrashing for one in series):
        style: dict[str, Any] = {"color": GREY, "marker": "o", "markerfacecolor": "white", "linestyle": "none"}
        keys.append(Line2D([], [], label="thrashing: runs, too slow to use", **style))
    return keys


def _framed(figure: Figure, series: Group, second: str, handles: Sequence[Any], notes: Sequence[str]) -> Figure:
    """Title above; legend below, where it hides no data, in as many columns as fit, with the notes over it."""
    width = figure.get_figwidth()
    title = (textwrap.fill(text, int(11 * width)) for text in (analysis.headline(series), second) if text)
    figure.suptitle("\n".join(title), x=0.01, ha="left")
    labels = [str(handle.get_label()) for handle in handles]

    def inches(columns: int) -> float:
        rows, longer = divmod(len(labels), columns)
        starts = [i * rows + min(i, longer) for i in range(columns + 1)]
        return sum(0.65 + 0.073 * max(map(len, labels[a:b])) for a, b in itertools.pairwise(starts))

    columns = next((n for n in (4, 3, 2) if n <= len(labels) and inches(n) < width), 1)
    over = "\n".join(textwrap.fill(note, int(14 * width)) for note in notes) or None
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, title=over, alignment="left")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sweep.plots", description="Draw the charts of a sweep.")
    parser.add_argument("results", nargs="*", type=Path, help="folders of results; default: all of them")
    parser.add_argument("--out", type=Path, default=Path("plots"), help="where plots/<sweep>/ goes")
    options = parser.parse_args(arguments)
    found, problems = 0, []
    for path in options.results or sorted(Path("results").glob("*")):
        store = Store(path.resolve())
        try:
            if written := draw(store, out := options.out / store.name):
                found += 1
                print(f"{out}: {len(written) // 2} charts, each as PNG and SVG")
            elif options.results:
                problems.append(f"{path} holds no measured cell; `make sweep` makes some")
        except (StoreError, OSError) as error:
            problems.append(str(error))
    if not found and not problems:
        problems.append("there is nothing to draw under results/; `make sweep` makes some")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
