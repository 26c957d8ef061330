"""Whole charts and their files: nothing out of view, names, what an earlier drawing left, the command, its errors."""

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest
from conftest import REPOSITORY
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.text import Text
from test_analysis import CUDA, LLAMA, VIRTUAL, cell, grid, out_of_memory, spec, study, thrashing, walk
from test_plots import eight_gpus, rendered, store_of

from sweep import plots
from sweep.analysis import series_of
from sweep.record import CellRecord, Phase, Status
from sweep.spec import Precision

SHAPES: dict[str, list[CellRecord]] = {
    "study": study(),
    "sixteen series": grid(),
    "nothing fits": [out_of_memory(spec(device=VIRTUAL), Phase.LOAD)],
    "nothing fits in a pair": [*walk({}, oom=1), *walk({}, oom=1, gradient_checkpointing=True)],
    "no rank reported": [cell(spec(), Status.OOM), cell(spec(gradient_checkpointing=True), Status.OOM)],
    "one point, one GPU": list(walk({1: (10, 20, 1.0)}, world_size=1)),
    "only thrashing": [thrashing(r) for r in walk({1: (10, 20, 1.0)})],
    "long name": list(walk({1: (10, 20, 1.0)}, oom=2, model=replace(LLAMA, name="a-$long$-name_" * 12))),
    "eight GPUs": eight_gpus(),
    "sixteen, all out of memory": [
        record for length in range(16) for record in walk({}, oom=1, seq_len=128 * (length + 1))
    ],
    "world sizes": [r for world in (1, 2, 4, 8, 16) for r in walk({1: (10, 20, 1.0)}, oom=2, world_size=world)],
}


def _labels_out_of_view(figure: Figure) -> set[Artist]:
    """Matplotlib keeps the labels of ticks beyond an axis's limits, and does not draw them."""
    found: set[Artist] = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        found |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return found


@pytest.mark.parametrize("shape", SHAPES)
@mpl.rc_context(plots.STYLE)
def test_every_shape_is_drawn_within_the_figure(shape: str) -> None:
    series = series_of(SHAPES[shape])
    more = [plots.Kind.SAMPLES, plots.Kind.PARETO, plots.Kind.DEVICES]
    drawn = dict([*plots.figures(series), *itertools.islice(plots.figures(series, more), 3)])
    for figure in drawn.values():
        renderer = rendered(figure)
        edge = figure.bbox
        unseen = _labels_out_of_view(figure)
        for text in figure.findobj(Text):
            box = text.get_window_extent(renderer)
            if text not in unseen and text.get_visible() and text.get_text() and box.width:
                assert edge.x0 - 2 <= box.x0, text
                assert box.x1 <= edge.x1 + 2, text
                assert edge.y0 - 2 <= box.y0, text
                assert box.y1 <= edge.y1 + 2, text
        for legend, axes in itertools.product(figure.legends, figure.axes):
            assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_draw_writes_readable_names_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    store = store_of(tmp_path / "results" / "study", study())
    out = tmp_path / "plots" / "study"
    written = plots.draw(store, out)
    assert sorted(out.iterdir()) == sorted(written)
    assert sorted(path.name for path in written if path.suffix == ".svg") == [
        "checkpointing_expandable-segments.svg",
        "checkpointing_no-expandable-segments.svg",
        "compare-expandable_segments-memory.svg",
        "compare-expandable_segments-time.svg",
        "compare-gradient_checkpointing-memory.svg",
        "compare-gradient_checkpointing-time.svg",
        "map.svg",
        "no-checkpointing_expandable-segments.svg",
        "pareto.svg",
        "samples.svg",
    ]
    before = {path: path.read_bytes() for path in written}
    plots.draw(store, out)
    assert {path: path.read_bytes() for path in written} == before
    svg = (out / "compare-expandable_segments-time.svg").read_text()
    assert "seconds per iteration (s)</text>" in svg
    assert re.search(r"\b20\d\d-\d\d-\d\d", svg) is None


def test_charts_that_no_longer_belong_are_removed_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "plots"
    plots.draw(store_of(tmp_path / "one", list(walk({1: (10, 20, 1.0)}, oom=2))), out)
    assert {path.name for path in out.iterdir()} == {"llama3-8b_zero-3.png", "llama3-8b_zero-3.svg"}
    (out / "mine.svg").write_text("<svg/>")
    (out / "mine.png").write_text("")
    plots.draw(store_of(tmp_path / "two", study()), out)
    names = {path.name for path in out.iterdir()}
    assert "llama3-8b_zero-3.png" not in names
    assert {"mine.svg", "mine.png"} <= names


def test_series_without_any_figure_are_left_out(tmp_path: Path) -> None:
    records = [
        *walk({1: (10, 20, 1.0)}, oom=2),
        cell(spec(precision=Precision.BF16_PURE), Status.UNSUPPORTED, reason="no"),
        cell(spec(precision=Precision.FP32), Status.FAILED, reason="no"),
    ]
    written = plots.draw(store_of(tmp_path / "sweep", records), tmp_path / "plots")
    assert [path.name for path in written] == ["llama3-8b_zero-3.png", "llama3-8b_zero-3.svg"]


def test_the_command_draws_every_folder_and_never_imports_torch(tmp_path: Path) -> None:
    store_of(tmp_path / "results" / "one", list(walk({1: (10, 20, 1.0)}, oom=2, device=CUDA)))
    store_of(tmp_path / "results" / "two", list(walk({1: (10, 20, 1.0)}, oom=2, device=VIRTUAL)))
    (tmp_path / "results" / "other").mkdir()
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import sweep.plots; code = sweep.plots.main([]);"
        "print({'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "plots/one: 1 charts, each as PNG and SVG",
        "plots/two: 1 charts, each as PNG and SVG",
        "set()",
    ], done.stderr
    assert done.returncode == 0
    assert (tmp_path / "plots" / "two" / "llama3-8b_zero-3.svg").exists()


def test_errors_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plots.main([]) == 1
    assert capsys.readouterr().err == "there is nothing to draw under results/; `make sweep` makes some\n"
    assert plots.main(["results/nope"]) == 1
    assert capsys.readouterr().err == "results/nope holds no measured cell; `make sweep` makes some\n"
    store = store_of(tmp_path / "results" / "bad", list(walk({1: (10, 20, 1.0)})))
    store_of(tmp_path / "results" / "good", list(walk({1: (10, 20, 1.0)})))
    store.cell("0" * 16).record_path.write_text("{")
    assert plots.main([]) == 1
    captured = capsys.readouterr()
    assert "cannot be read" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out.startswith("plots/good: ")
    with pytest.raises(SystemExit) as stopped:
        plots.main(["--nope"])
    assert stopped.value.code == 2
    assert not (tmp_path / "plots" / "bad").exists()
