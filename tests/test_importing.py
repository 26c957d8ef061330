"""Tables of other people's measurements become records that charts and tables take."""

from pathlib import Path

import pytest

from sweep import importing
from sweep.analysis import IMPORTED_SENTENCE, caveats, series_of, table
from sweep.record import Status
from sweep.spec import EngineName
from sweep.store import Store

STUDY = Path(__file__).parents[1] / "sweep/studies/published/checkpointing_8b.csv"
HEAD = "model,gpu,seq_len,batch_size,peak_reserved_mib\n"


def test_the_study_keeps_its_findings() -> None:
    series = series_of(importing.read(STUDY))
    assert [(row.largest, row.running) for row in table(series)] == [("2", 2), ("12", 12), ("13", 14)]
    last = series[2].records[14]
    assert series[2].slowdowns == {14: pytest.approx(1.53, abs=0.01)}
    assert [rank.reserved_peak_bytes for rank in (last.ranks[0], last.ranks[7])] == [78572 * 2**20, 78590 * 2**20]
    assert (last.imported_from, last.environment["liger"]) == ("gpjt/fine-tune-2024-04", "False")
    assert [len(record.ranks) for record in series[0].records.values()] == [8, 8, 0]
    assert {one.used for one in series} == {"active"}
    assert last.ranks[0].allocated_peak_bytes is None
    assert caveats(series) == [f"{IMPORTED_SENTENCE}: gpjt/fine-tune-2024-04"]


def test_the_command_writes_records_that_are_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert importing.main([str(STUDY), "--results", str(tmp_path), "--sweep", "study"]) == 0
        assert capsys.readouterr().out.endswith("study: 30 cells in 3 series from checkpointing_8b.csv\n")
    records = Store(tmp_path / "study").records()
    assert len(records) == 30
    assert {record.imported_from for record in records} == {"gpjt/fine-tune-2024-04"}
    assert "gpjt/fine-tune-2024-04" in (tmp_path / "study" / "cells.csv").read_text()


def test_unknown_names_are_mapped_and_constants_set(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("who,bs,mem_gib,note\nmy-model,1,10.5,a\nmy-model,2,,b\n")
    mapped = {"model": "who", "batch_size": "bs", "reserved": "mem_gib"}
    constants = {"gpu": "XPU 9", "capacity": "20480", "seq_len": "512", "parameters": "1000"}
    first, second = importing.read(path, mapped, constants)
    assert first.ranks[0].reserved_peak_bytes == 10.5 * 2**30
    assert (first.ranks[0].device_name, first.ranks[0].capacity_bytes) == ("XPU 9", 20 * 2**30)
    assert first.environment["note"] == "a"
    assert first.spec.engine.name is EngineName.DDP
    assert (second.status, second.ranks, second.imported_from) == (Status.OOM, (), "mine.csv")


def test_each_gpu_is_a_series_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text(HEAD + "tiny,a40,8,1,100\ntiny,a40,8,2,\ntiny,l4,8,1,100\ntiny,l4,8,2,\n")
    assert [sorted(one.records) for one in series_of(importing.read(path))] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,gpu,seq_len,batch_size\n", "mine.csv has no column for reserved: name it with --map reserved=COLUMN"),
        (HEAD, "mine.csv has no rows"),
        (HEAD + "tiny,a40,8,1,lots", "mine.csv has reserved=lots, which is no number of 0 or more"),
        (HEAD + "tiny,a40,8,1,nan", "mine.csv has reserved=nan, which is no number of 0 or more"),
        (HEAD + "tiny,a40,8,1.5,1", "mine.csv has batch_size=1.5, which is no whole number"),
        (HEAD + "tiny,a40,8,0,1", "batch_size=0 is not valid: give a whole number of 1 or more."),
        (HEAD + "../x,a40,8,1,1", "model=../x is none of conf/model/: say how large it is"),
        (HEAD + "tiny,abacus,8,1,1", "gpu=abacus is not known: say what it holds with --set capacity=MIB"),
        (HEAD + "tiny,a40,8,1,1\ntiny,a40,8,1,2", "mine.csv has two rows for rank 0 of one configuration"),
        (
            HEAD.replace("\n", ",engine\n") + "tiny,a40,8,1,1,fsdp",
            "engine.name=fsdp is not valid: choose one of single",
        ),
        (HEAD.replace("\n", ",status\n") + "tiny,a40,8,1,1,fine", "mine.csv says status=fine for batch_size=1"),
    ],
)
def test_what_cannot_be_taken_is_said_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    assert importing.main([str(path), "--results", str(tmp_path / "results")]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(message)
    assert shown.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_options_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in {
        ("--map", "weight=x"): "--map weight=x: give FIELD=..., FIELD one of model, ",
        ("--map", "reserved=nope"): "checkpointing_8b.csv has no column nope; it has source, ",
        ("--sweep", "../x"): "--sweep ../x: give a plain folder name",
    }.items():
        assert importing.main([str(STUDY), "--results", str(tmp_path), *arguments]) == 1
        assert capsys.readouterr().err.startswith(message)
