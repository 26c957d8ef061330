"""Whole training steps on every engine: they run, give zero for every loss, and the same numbers twice."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweep import virtual
from sweep.virtual.warm import WarmServer

ENGINES = ("single", "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")
SCRIPT = Path(__file__).with_name("train_script.py")
Train = Callable[..., str]


@pytest.fixture
def train(warm_server: WarmServer, tmp_path: Path) -> Train:
    """Starts the script and returns its answer as text, to be compared byte for byte."""
    numbers = itertools.count()

    def run(engine: str, size: str, *, checkpointing: bool, expandable: bool, steps: int, batch_size: int = 1) -> str:
        output = tmp_path / f"{next(numbers)}.txt"
        world_size = None if engine == "single" else 8
        environment = {**os.environ, **virtual.environment(virtual.gpu("a100-80gb"), world_size=world_size)}
        environment["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{expandable}"
        length = 64 if size == "tiny" else 1024
        arguments = [engine, size, str(batch_size), str(length), str(checkpointing), str(steps)]
        cell = warm_server.spawn([str(SCRIPT), *arguments], environment=environment, stdout=output)
        code = cell.wait(timeout=120)
        text = output.read_text(encoding="utf-8")
        assert code == 0, text
        return text.rpartition("answer: ")[2].splitlines()[0]

    return run


def _peak(answer: str, name: str) -> int:
    peaks: dict[str, Any] = json.loads(answer)["peaks"]
    return int(peaks[f"{name}_bytes.all.peak"])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_trains_and_repeats_itself(train: Train, engine: str) -> None:
    first, second = (train(engine, "tiny", checkpointing=False, expandable=False, steps=3) for _ in range(2))
    assert json.loads(first)["losses"] == [0.0]
    assert first == second


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_checkpointing_and_sharding_save_memory(train: Train, engine: str) -> None:
    plain, saving = (
        train(engine, "1b", checkpointing=checkpointing, expandable=True, steps=2, batch_size=4)
        for checkpointing in (False, True)
    )
    assert _peak(saving, "allocated") < _peak(plain, "allocated") - (1 << 30)


def test_zero_stages_shard_more_and_more(train: Train) -> None:
    peaks = [
        _peak(train(f"zero{stage}", "1b", checkpointing=True, expandable=False, steps=2), "allocated")
        for stage in (0, 1, 3)
    ]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_five_steps_of_a_1b_model_repeat_byte_for_byte(
    train: Train, engine: str, checkpointing: bool, expandable: bool
) -> None:
    first, second = (train(engine, "1b", checkpointing=checkpointing, expandable=expandable, steps=5) for _ in range(2))
    assert json.loads(first)["losses"] == [0.0]
    assert first == second


@pytest.mark.slow
def test_an_8b_model_on_eight_gpus(train: Train) -> None:
    answer = json.loads(train("zero3", "8b", checkpointing=True, expandable=True, steps=3))
    assert answer["losses"] == [0.0]
    # 16 bytes a parameter over 8 ranks, and the gathered layers, buckets and activations
    assert 16 * 8.03e9 / 8 < answer["peaks"]["allocated_bytes.all.peak"] < 16 * 8.03e9 / 8 + (8 << 30)
