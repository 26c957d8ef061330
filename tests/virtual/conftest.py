"""Runs small scripts with the real PyTorch on virtual GPUs, from one warm server."""

import json
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sweep import virtual
from sweep.virtual.warm import WarmServer

Script = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def needs_virtual_gpu() -> None:
    """Skips where this machine cannot do it, and says why."""
    if reason := virtual.check():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def warm_server(needs_virtual_gpu: None) -> Iterator[WarmServer]:
    with WarmServer() as server:
        yield server


@pytest.fixture
def on_gpu(warm_server: WarmServer, tmp_path: Path) -> Script:
    """Runs a script that leaves its answer in ``answer`` and returns it."""

    def run(script: str, *, gpu: str = "a100-80gb", allocator: str = "", **options: Any) -> dict[str, Any]:
        file, output = tmp_path / "script.py", tmp_path / "output.txt"
        output.unlink(missing_ok=True)
        ending = "\nimport json\nprint('answer:', json.dumps(answer))\n"
        file.write_text(textwrap.dedent(script) + ending, encoding="utf-8")
        profile = virtual.gpu(gpu) if isinstance(gpu, str) else gpu
        environment = {**os.environ, **virtual.environment(profile, **options), "PYTORCH_ALLOC_CONF": allocator}
        cell = warm_server.spawn([str(file)], environment=environment, stdout=output)
        code = cell.wait(timeout=120)
        text = output.read_text(encoding="utf-8")
        assert code == 0, text
        answer: dict[str, Any] = json.loads(text.rpartition("answer: ")[2].splitlines()[0])
        return answer

    return run
