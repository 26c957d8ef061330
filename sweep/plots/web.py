"""Charts for a web page: inline SVG whose points say their values."""

import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sweep.analysis import Series, varying_axes
from sweep.plots import figures
from sweep.plots.style import STYLE, Group

SVG = "http://www.w3.org/2000/svg"
UNITS = {"seconds": "s per iteration", "minutes": "minutes", "speed": "tokens/s"}
UNITS |= {f"estimated-{name}": f"{unit}, estimated" for name, unit in UNITS.items()}


def inline_charts(series: Group) -> Iterator[tuple[str, str]]:
    """The default charts: their names, and SVG elements to put into a page."""
    by_id = {one.series_id: one for one in series}
    with mpl.rc_context(STYLE):
        for number, (name, figure) in enumerate(figures(series)):
            yield name, _inline(figure, name, f"c{number}-", by_id, varying_axes(series))


def _inline(figure: Figure, name: str, prefix: str, by_id: dict[str, Series], varying: tuple[str, ...]) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(out.getvalue())  # noqa: S314
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    root.attrib.pop("height", None)
    root.attrib |= {"width": "100%", "role": "img", "aria-label": name.replace("-", " ").replace("_", ", ")}
    found: dict[str, list[ElementTree.Element]] = {}
    for element in root.iter(f"{{{SVG}}}g"):
        found.setdefault(element.get("id", ""), []).append(element)
    for line in figure.findobj(Line2D):
        elements = found.get(str(line.get_gid()), [])
        if len(elements) == 1:
            _tell(elements[0], _values(line, by_id, varying))
    for patch in figure.findobj(mpl.patches.Rectangle):
        words = str(patch.get_gid()).split(" ")
        elements = found.get(str(patch.get_gid()), [])
        if words[0] in ("cell", "limit") and len(elements) == 1:
            said = f"batch size {words[2]}: {words[1]}" if words[0] == "cell" else f"largest that fits: {words[1]}"
            _title(elements[0], _named(words[-1], by_id, varying) + said)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    text = ElementTree.tostring(root, encoding="unicode")
    # Several charts share a page: what one refers to must not be found in another.
    return re.sub(r'(\bid="|url\(#|href="#)', lambda match: match.group(1) + prefix, text)


def _named(series_id: str, by_id: dict[str, Series], varying: tuple[str, ...]) -> str:
    one = by_id.get(series_id)
    return f"{text}, " if one and (text := one.label(varying)) else ""


def _values(line: Line2D, by_id: dict[str, Series], varying: tuple[str, ...]) -> list[str]:
    *kind, series_id = str(line.get_gid()).split(" ")
    if not kind:
        return []
    what, series = kind[-1], _named(series_id, by_id, varying)
    points = zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True)  # type: ignore[arg-type]
    texts = []
    for x, y in points:
        if math.isnan(y):
            continue
        if what == "oom":
            value = f"batch size {x:g}: out of memory"
        elif what == "speed":
            value = f"{y:,.0f} tokens/s with {x:.2f} GiB"
        else:
            value = f"batch size {x:g}: {y:.4g} {UNITS.get(what, f'GiB {what}')}"
        texts.append(f"{series}{value}{', too slow to use' if kind[0] == 'thrashing' else ''}")
    return texts


def _tell(element: ElementTree.Element, texts: list[str]) -> None:
    marks = list(element.iter(f"{{{SVG}}}use"))
    if len(marks) == 2 * len(texts):  # half-filled marks are drawn in two halves, all first ones before all second ones
        texts = texts * 2
    if len(marks) == len(texts):
        for mark, text in zip(marks, texts, strict=True):
            _title(mark, text)


def _title(element: ElementTree.Element, text: str) -> None:
    title = ElementTree.Element(f"{{{SVG}}}title")
    title.text = text
    element.insert(0, title)
