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
    ],
)
def test_a_study_is_one_experiment(run_sweep: Run, tmp_path: Path, arguments: list[str], cells: list[str]) -> None:
    done = run_sweep(*arguments, "device=virtual", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:-1] == cells
    assert list(tmp_path.iterdir()) == []
