"""The published studies as experiments: what they compose to."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sweep import virtual
from sweep.walks import parts_meant

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_value_on_the_command_line_picks_parts_or_replaces_what_they_say() -> None:
    parts = [{"model": "small", "world_size": 1, "gpu": "a"}, {"model": "large", "world_size": 8, "gpu": "b"}]
    assert parts_meant(parts, ["precision=fp16"]) == parts
    assert parts_meant(parts, ["model=large"]) == parts[1:]
    assert parts_meant(parts, ["model=large", "world_size=2"]) == [{"model": "large", "gpu": "b"}]
    assert parts_meant(parts, ["gpu=c"]) == [{"model": "small", "world_size": 1}, {"model": "large", "world_size": 8}]
    assert parts_meant([{}], ["model=large"]) == [{}]


@pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))
@pytest.mark.parametrize(
    ("arguments", "cells"),
    [
        (
            ["experiment=checkpointing"],
            [
                "qwen1.5-0.5b ZeRO-3, fp16, batch 1",
                "qwen1.5-0.5b ZeRO-3, fp16, expandable, batch 1",
                "qwen1.5-0.5b ZeRO-3, fp16, checkpointing, batch 1",
                "qwen1.5-0.5b ZeRO-3, fp16, checkpointing, expandable, batch 1",
                "llama3-8b ZeRO-3, fp16, batch 1",
                "llama3-8b ZeRO-3, fp16, expandable, batch 1",
                "llama3-8b ZeRO-3, fp16, checkpointing, batch 1",
                "llama3-8b ZeRO-3, fp16, checkpointing, expandable, batch 1",
            ],
        ),
        (
            ["experiment=accumulation-memory"],
            [
                f"{model}, {precision}, checkpointing, {accumulation}batch 1"
                for model in ("pythia-1.4b single", "llama2-7b device_map")
                for precision in ("fp32", "bf16")
                for accumulation in ("", "accumulation 2, ")
            ],
        ),
        (
            ["experiment=accumulation-throughput"],
            [
                *("bloom-560m single, fp32, batch 1", "bloom-560m single, fp16, batch 1"),
                *(
                    f"bloom-560m single, {precision}, accumulation {accumulation}, batch 1"
                    for precision in ("fp32", "fp16")
                    for accumulation in (4, 8, 16)
                ),
            ],
        ),
    ],
)
def test_a_study_is_one_experiment(run_sweep: Run, tmp_path: Path, arguments: list[str], cells: list[str]) -> None:
    done = run_sweep(*arguments, "device=virtual", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:-1] == cells
    assert list(tmp_path.iterdir()) == []


def test_questions_that_nobody_asked_are_refused(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep("device=cpu", "questions=nope")
    assert done.returncode != 0
    assert "questions=nope is not valid: choose one of checkpointing, accumulation-memory" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))
def test_an_experiment_ends_with_its_answers(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep("experiment=accumulation-memory", "model=tiny", "engine=device_map", "device=virtual")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "tiny, device map, 2 x virtual A40, sequence length 8" in shown
    assert "bf16: 2 less 1 all +" in shown
    assert "bf16: accumulation 2 takes +" in shown
    assert (tmp_path / "results/accumulation-memory-tiny-virtual/cells.csv").is_file()
