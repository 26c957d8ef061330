"""One style for every chart: colours that anybody tells apart, a white ground, and a frame of title, legend, notes."""

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sweep import analysis
from sweep.analysis import Series, axis_label

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
ESTIMATED: Any = (0, (5, 2))
"""Dashes of times that were computed and not measured."""
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
    half: bool = False
    """Marks filled to the half: told from full ones where a point has no line, and from open ones, which thrash."""

    @property
    def style(self) -> dict[str, Any]:
        size = {"markersize": 5 * self.weight, "linewidth": 1.6 * self.weight}
        filling = {"fillstyle": "bottom", "markerfacecoloralt": "white"} if self.half else {}
        return {"color": self.colour, "marker": self.marker, **size, **filling}

    @property
    def key(self) -> Line2D:
        return Line2D([], [], label=self.label, linestyle=self.dashes, **replace(self, weight=1.0).style)


def mark_keys(series: Group, oom: bool, band: bool) -> list[Any]:
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


def time_label(text: str, series: Group) -> str:
    """An axis of times says when they are estimates."""
    if not any(one.time_is_estimated for one in series):
        return text
    return f"{text}, {'partly ' if any(one.time_is_measured for one in series) else ''}estimated"


def estimated_key(series: Group) -> list[Any]:
    """What dashes mean; nothing where there are none."""
    if not any(one.time_is_estimated for one in series):
        return []
    return [Line2D([], [], label="estimated, not measured", color=GREY, linestyle=ESTIMATED, linewidth=1.6)]


def framed(figure: Figure, series: Group, second: str, handles: Sequence[Any], notes: Sequence[str]) -> Figure:
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


def filled(label: str, width: int) -> str:
    """A label over lines of so many characters, broken between its parts where that is possible."""
    parts = ", ".join(part.replace(" ", "\xa0") for part in label.split(", "))
    return textwrap.fill(parts, width).replace("\xa0", " ")


def shortened(text: str, most: int) -> str:
    """What differs is often at the end: the middle is left out."""
    return text if len(text) <= most else f"{text[: most // 2 - 2]}...{text[-(most - most // 2 - 1) :]}"


def name_of(one: Series, varying: Sequence[str], most: int) -> str:
    return shortened(one.label(varying) or one.label(("model", "engine")), most)


def say(axes: Axes, text: str, upright_at: float | None = None) -> None:
    """Words in the middle of the panel, or turned and standing at a batch size."""
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9}
    style["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
    if upright_at is None:
        axes.text(0.5, 0.45, text, transform=axes.transAxes, **style)
    else:
        axes.text(upright_at, 0.45, text, transform=axes.get_xaxis_transform(), rotation=90, **style)


def memory_labels(one: Series) -> tuple[str, str]:
    return ("mapped address space (limit counted)", "resident") if one.is_cpu else ("reserved", one.used)


def looks_of(series: Group, axis: str) -> dict[object, Look]:
    values = list(dict.fromkeys(one.value(axis) for one in series))
    looks = {}
    for i, value in enumerate(values):
        # After the last colour they begin anew, each with another mark than before.
        colour = VALUE_COLOURS[i % len(VALUE_COLOURS)]
        marker = VALUE_MARKERS[(i + i // len(VALUE_COLOURS)) % len(VALUE_MARKERS)]
        weight = 1.5 - 0.5 * i / max(1, len(values) - 1)
        label = axis_label(axis, value) or str(value)
        looks[value] = Look(colour=colour, marker=marker, label=label, weight=weight)
    return looks
