"""The table on screen and the summary in Markdown."""

import io
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPOSITORY
from rich.console import Console
from test_analysis import CPU, CUDA, LLAMA, VIRTUAL, cell, grid, out_of_memory, spec, study, walk
from test_plots import store_of

from sweep import report
from sweep.analysis import VIRTUAL_SENTENCE
from sweep.record import CellRecord, Failure, Phase, Status


def printed(records: Sequence[CellRecord], width: int, name: str | None = None) -> str:
    out = io.StringIO()
    report.print_summary(Console(width=width, file=out), records, name=name)
    return out.getvalue()


def table_of(text: str) -> list[list[str]]:
    """The cells of the first Markdown table, without its rule."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    first = rows[: next((i for i, row in enumerate(rows[2:], 2) if row.startswith("| ---")), len(rows) + 1) - 1]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in first if "---" not in row]


@pytest.mark.parametrize("width", [80, 110, 200])
@pytest.mark.parametrize(
    "records", [study(), study(VIRTUAL), grid(), grid(CUDA)], ids=["study", "virtual", "16", "16t"]
)
def test_the_table_fits_the_screen_and_cuts_nothing(width: int, records: list[CellRecord]) -> None:
    shown = printed(records, width)
    assert max(map(len, shown.splitlines())) <= min(width, 110)
    assert "…" not in shown
    for text in ("largest", "reserved", "next size", "OOM in"):
        assert text in shown


def test_a_wide_screen_shows_what_the_study_measured() -> None:
    shown = printed(study(), 110, "study")
    assert shown.startswith("study: llama3-8b, ZeRO-3, 8 x A100-SXM4-80GB, sequence length 2048\nbf16, AdamW\n")
    row = next(line.split() for line in shown.splitlines() if " 12 " in line)
    assert row[:9] == ["yes", "no", "12", "12", "96", "76.24", "63.35", "9.66", "20,361"]
    row = next(line.split() for line in shown.splitlines() if " 13 " in line)
    assert row[:5] == ["yes", "yes", "13", "14", "104"], "14 runs, 13 is usable"


def test_a_narrow_screen_keeps_the_answer() -> None:
    shown = printed(grid(), 80)
    assert "allocated" not in shown
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith(("bf16", "fp32"))]
    assert len(rows) == 16
    assert rows[0][:7] == ["bf16", "no", "no", "1", "2", "16", "68.36"]


def test_a_crowded_screen_leaves_the_bytes_to_the_summary() -> None:
    shown = printed(grid(CUDA), 80)
    assert "asked for" not in shown
    assert len(shown.splitlines()) < 45


def test_what_is_virtual_is_said() -> None:
    for width in (80, 110):
        assert VIRTUAL_SENTENCE in printed(study(VIRTUAL), width)
    assert "not measured" in printed(study(VIRTUAL), 110)
    assert VIRTUAL_SENTENCE not in printed(study(), 110)


def test_nothing_fits_and_nothing_at_all() -> None:
    shown = printed([out_of_memory(spec(), Phase.LOAD)], 80)
    assert "none" in shown
    assert "1: OOM in load, asked for 1.96 GiB" in shown
    assert printed([], 80) == "No cell has finished yet.\n"


def test_surprises_stand_under_the_table() -> None:
    records = [*walk({1: (10, 20, 1.0), 4: (10, 20, 1.0)}, oom=5), out_of_memory(spec(batch_size=3))]
    assert "although 4 runs" in printed(records, 110)


def test_names_are_never_markup() -> None:
    model = replace(LLAMA, name="[red]llama[/red]")
    assert "[red]llama[/red]" in printed(list(walk({1: (10, 20, 1.0)}, model=model)), 110)


def test_the_cpu_names_its_own_kinds_of_memory() -> None:
    records = list(walk({1: (300, 500, 0.2)}, oom=2, device=CPU, world_size=2))
    shown = printed(records, 110)
    assert "mapped" in shown
    assert "resident" in shown
    assert "mapped peak (GiB)" in report.markdown("cpu", records)


def test_markdown_holds_every_figure() -> None:
    text = report.markdown("study", study())
    assert text.startswith("# study\n\nllama3-8b, ZeRO-3, 8 x A100-SXM4-80GB, sequence length 2048\n\n")
    head, *rows = table_of(text)
    assert head == [
        "gradient checkpointing",
        "expandable segments",
        "largest batch that fits, per device",
        "largest that runs at all",
        "overall",
        "reserved peak (GiB)",
        "allocated peak (GiB)",
        "reserved, of capacity",
        "seconds per iteration",
        "tokens/s",
        "next size",
    ]
    last = "13: OOM in backward, asked for 1.96 GiB"
    assert rows[1] == ["yes", "no", "12", "12", "96", "76.24", "63.35", "96%", "9.66", "20,361", last]
    assert len(rows) == 3
    assert "- torch: 2.9.1" in text
    assert "- device: NVIDIA A100-SXM4-80GB" in text
    assert "Cells that gave no figure" not in text


def test_markdown_tells_what_is_virtual() -> None:
    text = report.markdown("virtual", study(VIRTUAL))
    assert VIRTUAL_SENTENCE[1:] in text
    assert "not measured" in table_of(text)[1]
    assert "Seconds per iteration are" not in text


def test_markdown_lists_failures_with_their_reasons_and_escapes_them() -> None:
    failure = Failure(kind="RuntimeError", message="expected <class 'int'> | got\n`x`")
    records = [
        *walk({1: (10, 20, 1.0)}),
        cell(spec(batch_size=2), Status.FAILED, failure=failure, environment={"torch": "2.9.1", "driver": None}),
    ]
    text = report.markdown("a|b", records)
    assert text.startswith("# a\\|b\n")
    (line,) = [line for line in text.splitlines() if "batch\\_size=2" in line]
    assert "failed: RuntimeError: expected &lt;class 'int'&gt; \\| got \\`x\\`" in line
    assert line.startswith("| llama3-8b, ZeRO-3 | 2 |")


def test_environments_that_differ_are_all_named() -> None:
    records = [
        *walk({1: (10, 20, 1.0)}),
        cell(spec(batch_size=2), environment={"torch": "2.10.0", "host_memory_bytes": 8 * 2**30, "gpus": ["A", "A"]}),
    ]
    text = report.markdown("mixed", records)
    assert "- torch: 2.9.1 / 2.10.0" in text
    assert "- host memory: 8.00 GiB" in text
    assert "- gpus: A\n" in text


def test_the_command_prints_writes_and_never_imports_torch(tmp_path: Path) -> None:
    store_of(tmp_path / "results" / "study", study())
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import sweep.report; code = sweep.report.main([]);"
        "print({'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("study: llama3-8b")
    assert done.stdout.endswith("set()\n")
    assert (tmp_path / "results" / "study" / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "results" / "study" / "summary.md").read_text().startswith("# study\n")


def test_errors_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report.main([]) == 1
    assert capsys.readouterr().err == "there are no results under results/; `make sweep` makes some\n"
    assert report.main(["results/nope"]) == 1
    assert capsys.readouterr().err == "results/nope holds no finished cell; `make sweep` makes some\n"
    with pytest.raises(SystemExit) as stopped:
        report.main(["--nope"])
    assert stopped.value.code == 2
