"""A Trainer script, unchanged, on one GPU and as rank 0 of eight: every loss and gradient norm is 0."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from sweep import virtual
from sweep.virtual.warm import WarmServer

SCRIPT = Path(__file__).with_name("trainer_script.py")
NEEDS = {"liger": "liger_kernel", "lora": "peft"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [
        ("plain", 1),
        ("plain", 8),
        ("fp16", 1),
        ("accumulation", 8),
        ("zero3", 8),
        ("fsdp", 8),
        ("lora", 8),
        pytest.param("liger", 1, marks=SLOW),
        pytest.param("compile", 1, marks=SLOW),
    ],
)
def test_trainer(warm_server: WarmServer, tmp_path: Path, mode: str, world_size: int) -> None:
    if mode in NEEDS and importlib.util.find_spec(NEEDS[mode]) is None:
        pytest.skip(f"{NEEDS[mode]} is not installed")
    world = None if world_size == 1 else world_size
    environment = {**os.environ, **virtual.environment(virtual.gpu("a100-80gb"), world_size=world)}
    output = tmp_path / "output.txt"
    cell = warm_server.spawn([str(SCRIPT), mode, str(tmp_path / "out")], environment=environment, stdout=output)
    code = cell.wait(timeout=300)
    text = output.read_text(encoding="utf-8")
    assert code == 0, text
    answer = json.loads(text.rpartition("answer: ")[2].splitlines()[0])
    assert answer["world_size"] == world_size
    assert answer["logged"] == [0.0]
    assert answer["entries"] == 4 * 2 + 2 + 1
    assert answer["perplexity"] == 1.0
