"""A sweep in other tools' formats, read back with their libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import REPOSITORY
from test_analysis import VIRTUAL, out_of_memory, spec, study, walk
from test_plots import store_of

from sweep import exporting, loggers
from sweep.record import Status


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_tables_come_back(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path / "study", study())
    out = tmp_path / f"out.{form}"
    assert exporting.main([str(tmp_path / "study"), "--to", form, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 30 cells as {form}\n"
    readers: dict[str, Any] = {
        "csv": pd.read_csv,
        "parquet": pd.read_parquet,
        "jsonl": lambda path: pd.read_json(path, lines=True),
    }
    table = readers[form](out)
    assert len(table) == 30
    assert table["reserved_peak_bytes"].max() == 78_572 * 2**20
    assert table["seconds_per_iteration"].isna().sum() == 2
    assert set(table["status"]) == {"ok", "oom", "thrashing"}


def test_nothing_known_in_a_column_is_no_trouble(tmp_path: Path) -> None:
    store_of(tmp_path / "virtual", [*walk({1: (10, 20, 1.0)}, device=VIRTUAL)])
    assert exporting.main([str(tmp_path / "virtual"), "--to=parquet", "--out", str(tmp_path / "v.parquet")]) == 0
    assert pd.read_parquet(tmp_path / "v.parquet")["seconds_per_iteration"].isna().all()


def test_what_a_logger_is_told() -> None:
    (first, _, _), (_, _, steps), _ = loggers.runs(study())
    assert first.startswith("llama3-8b-ZeRO-3-bf16-")
    assert [step for step, _ in steps] == list(range(1, 14))
    assert steps[-1][1] == {"oom": 1.0}
    assert steps[0][1]["time/seconds_per_iteration"] == 1.048
    assert loggers.scalars(out_of_memory(spec())) == {"oom": 1.0}
    assert Status.OOM is out_of_memory(spec()).status


def exported(tmp_path: Path, logger: str) -> "subprocess.CompletedProcess[str]":
    store_of(tmp_path / "study", study())
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from sweep import exporting\n"
        f"code = exporting.main(['study', '--to', {logger!r}]); print('torch' in sys.modules); sys.exit(code)"
    )
    variables = {"WANDB_SILENT": "true", "WANDB_API_KEY": ""}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_tensorboard_reads_the_runs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    done = exported(tmp_path, "tensorboard")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False", "torch is left alone"
    program = (
        "import json, pathlib; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = {}\n"
        "for folder in pathlib.Path('runs/study').iterdir():\n"
        "    events = EventAccumulator(str(folder)).Reload()\n"
        "    found[folder.name] = [(e.step, e.value) for e in events.Scalars('memory/reserved_peak_bytes')]\n"
        "print(json.dumps(list(found.values())))"
    )
    read = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert read.returncode == 0, read.stderr
    assert sorted(len(points) for points in json.loads(read.stdout)) == [2, 12, 14]


def test_weights_and_biases_works_offline(tmp_path: Path) -> None:
    pytest.importorskip("importlib.metadata").version("wandb")
    done = exported(tmp_path, "wandb")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs" / "wandb").glob("offline-run-*/*.wandb"))) == 3


def test_a_logger_that_is_missing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store_of(tmp_path / "study", study())
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert exporting.main([str(tmp_path / "study"), "--to", "wandb", "--out", str(tmp_path)]) == 1
    assert "pip install wandb" in capsys.readouterr().err
    assert exporting.main([str(tmp_path / "none"), "--to", "csv"]) == 1
    assert "holds no finished cell" in capsys.readouterr().err
