"""What several tests need: a small spec, and the sweep run as a user runs it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweep import models
from sweep.spec import CellSpec, from_json

REPOSITORY = Path(__file__).resolve().parent.parent


def read_model(name: str) -> dict[str, Any]:
    return models.model(name)


@pytest.fixture
def make_spec() -> Callable[..., CellSpec]:
    """A tiny cell on the CPU device; keyword arguments replace top-level fields."""

    def make(**changes: Any) -> CellSpec:
        content = {
            "model": read_model("tiny"),
            "engine": {"name": "ddp"},
            "device": {"kind": "cpu", "memory_limit_bytes": 512 * 2**20},
            "world_size": 1,
            "batch_size": 1,
            "seq_len": 32,
            "precision": "fp32",
            "warmup_iterations": 1,
            "measured_iterations": 2,
        }
        return from_json(CellSpec, content | changes)

    return make


@pytest.fixture
def run_sweep(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """`python -m sweep.run ...` in an empty folder."""

    def run(*arguments: str, module: str = "sweep.run") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run
