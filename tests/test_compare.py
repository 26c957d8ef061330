"""Two sweeps cell by cell."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_analysis import VIRTUAL, cell, only, out_of_memory, spec, study, walk
from test_plots import store_of

from sweep import compare
from sweep.analysis import AxisError, series_of
from sweep.compare import Tolerance, differences
from sweep.record import CellRecord, Status
from sweep.spec import Precision

FIGURES = {1: (100, 200, 1.0), 2: (150, 300, 1.9)}

Compared = Callable[..., tuple[int, str]]


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compared:
    def run(before: Sequence[CellRecord], after: Sequence[CellRecord], *options: str) -> tuple[int, str]:
        folders = [str(tmp_path / name) for name in ("before", "after")]
        for folder, records in zip(folders, (before, after), strict=True):
            store_of(Path(folder), records)
        code = compare.main([*folders, *options])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def test_a_sweep_is_within_tolerance_of_itself(compared: Compared) -> None:
    code, shown = compared(study(), study())
    assert code == 0
    assert "0 of 30 cells differ" in shown


def test_memory_and_time_have_their_own_tolerances(compared: Compared) -> None:
    slower = {1: (103, 200, 1.2), 2: (150, 300, 1.9)}
    code, shown = compared(list(walk(FIGURES)), list(walk(slower)))
    assert code == 1
    assert "allocated +3.0%, time +20.0%" in shown
    assert "1 of 2 cells differ" in shown
    (one, two), *_ = differences([only(walk(FIGURES))], [only(walk(slower))])
    assert one.beyond(Tolerance(memory=0.05, time=0.25)) == []
    assert two.beyond(Tolerance(memory=0, time=0)) == []


def test_options_widen_the_tolerances(compared: Compared) -> None:
    slower = {1: (103, 200, 1.2), 2: (150, 300, 1.9)}
    assert compared(list(walk(FIGURES)), list(walk(slower)), "--memory=5%", "--time=0.25", "--all")[0] == 0


def test_another_outcome_is_a_difference(compared: Compared) -> None:
    code, shown = compared(list(walk(FIGURES)), [*walk({1: FIGURES[1]}), out_of_memory(spec(batch_size=2))])
    assert code == 1
    assert "ok -> oom" in shown


def test_virtual_and_real_are_compared_in_memory_alone(compared: Compared) -> None:
    code, shown = compared(list(walk(FIGURES)), list(walk(FIGURES, device=VIRTUAL)))
    assert code == 0
    assert "time known on both sides for 0" in shown
    assert "virtual GPU: memory is PyTorch's own" in shown


def test_axes_can_be_ignored_and_chosen(compared: Compared) -> None:
    other = list(walk(FIGURES, precision=Precision.FP16))
    code, shown = compared(list(walk(FIGURES)), other)
    said = "before and after have no cell in common; --ignore AXIS lets an axis differ"
    assert (code, shown.splitlines()[-1]) == (2, said)


def test_an_ignored_axis_may_differ(compared: Compared) -> None:
    assert compared(list(walk(FIGURES)), list(walk(FIGURES, precision=Precision.FP16)), "--ignore", "precision")[0] == 0


def test_what_cannot_be_told_apart_is_an_error() -> None:
    both = series_of([*walk(FIGURES), *walk(FIGURES, precision=Precision.FP16)])
    with pytest.raises(AxisError, match="two series of one sweep differ in nothing that is compared"):
        differences(both, both, ["precision"])
    with pytest.raises(AxisError, match="--ignore colour: choose one of accumulation"):
        differences(both, both, ["colour"])


def test_cells_of_one_side_alone_are_counted(compared: Compared) -> None:
    code, shown = compared(list(walk(FIGURES, oom=3)), list(walk({1: FIGURES[1]})))
    assert code == 0
    assert "only the first has 2 more cells, only the second 0" in shown


def test_thrashing_is_told_by_its_time(compared: Compared) -> None:
    before = list(walk({1: (100, 200, 1.0)}))
    after = [replace(record, status=Status.THRASHING) for record in before]
    assert compared(before, after)[0] == 0


def test_an_empty_folder_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path / "a", [cell(spec(), Status.FAILED)])
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert "holds no finished cell" in capsys.readouterr().err


def test_three_sweeps_beside_each_other_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published, virtual, measured: every figure, and its error relative to the first sweep's."""
    sweeps = {
        "published": list(walk({1: (100, 200, 1.0), 2: (150, 400, 2.0)}, oom=3)),
        "virtual": list(walk({1: (101, 200, 1.0)}, oom=2, device=VIRTUAL)),
        "measured": list(walk({1: (100, 204, 0.9), 2: (150, 390, 2.0)}, oom=3)),
    }
    folders = [str(store_of(tmp_path / name, records).path) for name, records in sweeps.items()]
    assert compare.main([*folders, "--markdown", str(tmp_path / "table.md")]) == 1
    shown = capsys.readouterr().out
    assert "published -> virtual" in shown
    assert "published -> measured" in shown
    lines = (tmp_path / "table.md").read_text().splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    one, two, three = (dict(zip(head, cells, strict=True)) for cells in rows)
    assert [one[f"reserved error, {name}"] for name in ("virtual", "measured")] == ["+0.00%", "+2.00%"]
    assert [two[f"reserved error, {name}"] for name in ("virtual", "measured")] == ["", "-2.50%"]
    assert [each["reserved, virtual"] for each in (one, two, three)] == ["200", "OOM", "not run"]
    assert (one["seconds per iteration, virtual"], one["seconds per iteration, measured"]) == ("", "0.9")
    assert (one["allocated error, virtual"], three["reserved, measured"]) == ("+1.00%", "OOM")
