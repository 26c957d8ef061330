"""The charts: one iteration over its allocations, a series over its batch sizes, two cells side by side.

Every category has one place in the order and one colour, in all of them.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sweep.analysis import GIB, VIRTUAL_SENTENCE, size_text
from sweep.explain.differences import by_category, moment, names, sentence
from sweep.explain.growth import growth
from sweep.explanation import Category, Explanation
from sweep.plots.style import BLACK, CREATOR, GREY, STYLE
from sweep.record import Phase
from sweep.spec import DeviceKind

COLOURS: Mapping[Category, str] = {
    Category.PARAMETERS: "#0072B2",
    Category.MASTER_WEIGHTS: "#004C77",
    Category.OPTIMIZER_STATES: "#56B4E9",
    Category.GRADIENTS: "#009E73",
    Category.UNSHARDED_GRADIENTS: "#7FD4B6",
    Category.GATHERED_PARAMETERS: "#E69F00",
    Category.WEIGHT_COPIES: "#F7D08A",
    Category.ACTIVATIONS: "#D55E00",
    Category.LOGITS: "#CC79A7",
    Category.KV_CACHE: "#7A3E62",
    Category.COMMUNICATION: "#8C8C8C",
    Category.TEMPORARIES: "#F2A285",
    Category.WORKSPACES: "#595959",
    Category.UNATTRIBUTED: "#000000",
    Category.SLACK: "#E8E8E8",
    Category.CONTEXT: "#C4C4C4",
}
SEEN = 0.004
"""Part of the highest stack below which a category is not in the legend: it could not be seen."""
PHASE_SHADES = {Phase.FORWARD: "#ffffff", Phase.BACKWARD: "#eeeeee", Phase.OPTIMIZER: "#d9d9d9"}


def timeline_figure(one: Explanation) -> Figure:
    """Allocated bytes by category over the allocations and frees of one iteration."""
    figure = Figure(figsize=(9, 5.6))
    axes = figure.subplots()
    timeline = one.timeline
    levels = [[size / GIB for size in timeline.bytes[category]] for category in timeline.bytes]
    colours = [COLOURS[category] for category in timeline.bytes]
    axes.stackplot(timeline.indices, levels, colors=colours, linewidth=0, step="post")
    totals = [sum(column) for column in zip(*levels, strict=True)]
    top = max(totals)
    axes.set_xlim(0, timeline.events)
    axes.set_ylim(0, 1.22 * top)
    _phases(axes, one)
    at = timeline.indices[totals.index(top)]
    right = at > 0.6 * timeline.events
    axes.plot([at], [top], marker="v", color=BLACK, markersize=7, linestyle="none", gid="peak", clip_on=False)
    inside = f"\nin {one.module}" if one.module else ""
    axes.annotate(
        f"peak {one.allocated_bytes / GIB:.2f} GiB, {moment(one)}{inside}",
        (at, top),
        (-9 if right else 9, 3),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=9,
    )
    axes.set_xlabel("allocations and frees of one iteration, in their order (not time)")
    axes.set_ylabel("allocated memory (GiB)")
    axes.grid(visible=False)
    highest = {category: max(sizes) for category, sizes in timeline.bytes.items()}
    return _framed(figure, [one], "what one iteration holds", _keys(highest, one.allocated_bytes))


def _phases(axes: Axes, one: Explanation) -> None:
    """Shades behind, and the phase's name on top where its stretch is wide enough to hold it."""
    starts = [*one.timeline.phases]
    ends = [each.index for each in starts[1:]] + [one.timeline.events]
    for start, end in zip(starts, ends, strict=True):
        axes.axvspan(start.index, end, color=PHASE_SHADES.get(start.phase, "#ffffff"), zorder=-1, linewidth=0)
        axes.axvline(start.index, color=GREY, linewidth=0.6, linestyle=":")
        share = (end - start.index) / one.timeline.events
        if share > 0.012:
            name = start.phase.value if share > 0.09 or share < 0.05 else start.phase.value[:3] + "."
            number = f" {start.micro_batch + 1}" if one.spec.accumulation > 1 else ""
            style: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 8.5, "color": GREY}
            style["rotation"] = 0 if share > 0.05 else 90
            axes.text((start.index + end) / 2, 0.985, name + number, transform=axes.get_xaxis_transform(), **style)


def growth_figure(series: Sequence[Explanation]) -> Figure:
    """The peak by category against batch size; the line through each category is in the legend."""
    figure = Figure(figsize=(9, 5.6))
    axes = figure.subplots()
    positions = list(range(len(series)))
    _stacks(axes, series, positions)
    axes.set_xticks(positions, [str(one.spec.batch_size) for one in series])
    axes.set_xlabel("batch size per device")
    slopes = {line.category: line for line in growth(series)}
    whole = sum(max(0.0, line.per_sample_bytes) for line in slopes.values())

    def label(category: Category) -> str:
        line = slopes.get(category)
        if line is None or abs(line.per_sample_bytes) < 0.01 * whole:
            return category.value
        per_token = line.per_token_bytes(series[0].spec.seq_len) / 1024
        size = size_text(abs(round(line.per_sample_bytes)))
        return f"{category.value}: {'-' * (line.per_sample_bytes < 0)}{size} per sample, {per_token:,.0f} KiB per token"

    highest = {category: max(one.categories.get(category, 0) for one in series) for category in Category}
    keys = _keys(highest, max(one.allocated_bytes for one in series), label)
    return _framed(figure, series, "what grows with the batch size, at the peak", keys, columns=2)


def comparison_figure(before: Explanation, after: Explanation) -> Figure:
    """Two stacks, and the difference of each category beside them."""
    figure = Figure(figsize=(9, 5.4))
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    _stacks(left, [before, after], [0, 1])
    left.set_xticks([0, 1], [textwrap.fill(name, 20) for name in names(before, after)])
    differences = {category: size for category, size in by_category(before, after).items() if size}
    least = SEEN * max(before.allocated_bytes, after.allocated_bytes)
    shown = [category for category in Category if abs(differences.get(category, 0)) > least]
    rows = list(range(len(shown)))  # from below, as the stacks
    sizes = [differences[category] / GIB for category in shown]
    right.barh(rows, sizes, color=[COLOURS[category] for category in shown], height=0.65)
    right.set_yticks(rows, [category.value for category in shown])
    right.set_axisbelow(True)
    right.set_ylim(-0.5 - max(0, 5 - len(shown)) / 2, len(shown) - 0.5 + max(0, 5 - len(shown)) / 2)
    right.axvline(0, color=BLACK, linewidth=0.8)
    right.grid(axis="y", visible=False)
    right.grid(axis="x", visible=True)
    for row, size in zip(rows, sizes, strict=True):
        offset = (4, 0) if size >= 0 else (-4, 0)
        place: dict[str, Any] = {"textcoords": "offset points", "ha": "left" if size >= 0 else "right", "va": "center"}
        right.annotate(f"{size:+.2f}", (size, row), offset, fontsize=9, **place)
    if not shown:
        right.text(0.5, 0.5, "no category differs", transform=right.transAxes, ha="center")
    right.margins(x=0.22)
    right.set_xlabel("difference at the peak (GiB)")
    highest = {c: max(before.categories.get(c, 0), after.categories.get(c, 0)) for c in Category}
    keys = _keys(highest, max(before.allocated_bytes, after.allocated_bytes))
    return _framed(figure, [before, after], sentence(before, after), keys)


def _stacks(axes: Axes, cells: Sequence[Explanation], positions: Sequence[int]) -> None:
    bottoms = [0.0] * len(cells)
    for category in Category:
        heights = [one.categories.get(category, 0) / GIB if category.allocated else 0.0 for one in cells]
        axes.bar(positions, heights, bottom=bottoms, color=COLOURS[category], width=0.62, gid=category.name.lower())
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for position, total in zip(positions, bottoms, strict=True):
        axes.annotate(f"{total:.2f}", (position, total), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.set_axisbelow(True)
    axes.set_ylim(0, 1.1 * max(bottoms))
    axes.set_xlim(positions[0] - 0.6, positions[-1] + 0.6)
    axes.set_ylabel("allocated memory at the peak (GiB)")


def _keys(
    highest: Mapping[Category, int], peak: int, label: Callable[[Category], str] = lambda category: category.value
) -> list[Patch]:
    shown = [c for c in Category if c.allocated and highest.get(c, 0) > SEEN * peak]
    return [Patch(facecolor=COLOURS[category], label=label(category)) for category in shown]


def _framed(
    figure: Figure, cells: Sequence[Explanation], second: str, keys: Sequence[Patch], columns: int = 4
) -> Figure:
    spec = cells[0].spec
    parts = [
        spec.model.name,
        spec.engine.label,
        f"{spec.world_size} x {cells[0].device_name}",
        spec.precision.value,
        f"{spec.seq_len} tokens",
    ]
    if len({one.spec.batch_size for one in cells}) == 1:
        parts.append(f"batch size {spec.batch_size}")
    if len({one.spec.gradient_checkpointing for one in cells}) == 1:
        parts.append(f"{'with' if spec.gradient_checkpointing else 'without'} gradient checkpointing")
    if len({one.spec.accumulation for one in cells}) == 1 and spec.accumulation > 1:
        parts.append(f"accumulation {spec.accumulation}")
    title = [textwrap.fill(text, 108) for text in (", ".join(parts), second)]
    figure.suptitle("\n".join(title), x=0.01, ha="left")
    virtual = any(one.spec.device.kind is DeviceKind.VIRTUAL for one in cells)
    note = VIRTUAL_SENTENCE if virtual else None
    style: dict[str, Any] = {"loc": "outside lower left", "ncols": columns, "alignment": "left"}
    figure.legend(handles=list(keys), title=note, **style)
    return figure


def save(figures: Mapping[str, Callable[[], Figure]], out: Path) -> list[Path]:
    """Draw each into `out` as PNG and SVG; the PNGs' paths."""
    written = []
    out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, draw in figures.items():
            figure = draw()
            png = out / f"{name}.png"
            figure.savefig(png, metadata={"Software": CREATOR})
            figure.set_layout_engine("none")
            figure.savefig(png.with_suffix(".svg"), metadata={"Creator": CREATOR, "Date": None})
            written.append(png)
    return written
