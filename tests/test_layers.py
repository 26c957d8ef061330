"""The rooms of ARCHITECTURE.md: imports run downwards, and the parent never needs torch."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

BELOW = {
    "spec": set(),
    "record": {"spec"},
    "store": {"spec", "record"},
    "models": {"spec"},
    "help": {"config"},
    "workloads": {"spec"},
    "plan": {"spec", "record"},
    "walks": {"spec", "record", "store", "environment", "config", "plan"},
    "prior": {"spec", "store", "plan", "launch", "virtual"},
    "environment": {"spec", "virtual", "nvml"},
    "config": {"spec", "models", "workloads", "environment", "virtual", "config_files"},
    "config_files": {"spec"},
    "measure": {"spec", "record", "nvml"},
    "explanation": {"spec", "record"},
    "estimate": {"spec", "record", "virtual"},
    "worker": {"spec", "record", "store", "measure", "estimate", "launch", "explanation"},
    "launch": {"spec", "record", "store", "environment", "estimate", "virtual", "nvml", "explanation"},
    "calibrate": {"spec", "record", "store", "estimate", "launch", "prior", "virtual", "analysis"},
    "analysis": {"spec", "record"},
    "importing": {"spec", "record", "store", "models", "virtual"},
    "plots": {"spec", "record", "store", "analysis"},
    "summary": {"spec", "record", "analysis"},
    "page": {"record", "analysis", "plots", "summary"},
    "report": {"store", "page", "summary"},
    "studies": {"spec", "record", "store", "analysis", "plots", "importing"},
    "recommend": {"spec", "record", "store", "analysis", "emit"},
    "emit": {"spec"},
    "explain": {
        *{"spec", "record", "store", "config", "environment", "launch", "virtual", "usage", "prior"},
        *{"analysis", "plots", "screen", "explanation"},
    },
    "compare": {"record", "store", "analysis"},
    "exporting": {"record", "store", "loggers"},
    "loggers": {"spec", "record"},
    "virtual": set(),
    "nvml": set(),
    "gpu_check": {"spec", "models", "record", "store", "environment", "launch", "virtual", "nvml"},
}


def imported_rooms(room: str) -> set[str]:
    path = REPOSITORY / "sweep" / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            found |= {name.split(".")[1] for name in names if name.startswith("sweep.")}
    return found - {room, "__version__"}


@pytest.mark.parametrize("room", BELOW)
def test_imports_run_downwards(room: str) -> None:
    assert imported_rooms(room) <= BELOW[room]


@pytest.mark.parametrize(
    "module",
    ["sweep.run", "sweep.plots", "sweep.report", "sweep.cli", "sweep.explain", "hydra_plugins.sweep_until_oom"],
)
def test_the_parent_leaves_torch_alone(module: str) -> None:
    program = f"import sys, {module}; sys.exit(str({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.stderr.strip() == "set()"


def test_the_virtual_gpu_needs_nothing_of_the_rest() -> None:
    unwanted = ("torch", "hydra", "omegaconf", "sweep.spec")
    program = f"import sys, sweep.virtual; print([m for m in sys.modules if m in {unwanted}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.strip() == "[]"


def test_every_room_is_on_the_page() -> None:
    page = (REPOSITORY / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`(?:sweep/)?([a-z_]+(?:\.[a-z]+)?)/?`", page))
    rooms = {path.name for path in (REPOSITORY / "sweep").iterdir() if not path.name.startswith("__")}
    assert rooms - named == set()
    paths = re.findall(r"`((?:sweep|hydra_plugins)/[a-z_/.]*|[a-z_]+/)`", page)
    inside = ("", "sweep", "sweep/worker")
    assert [path for path in paths if not any((REPOSITORY / room / path).exists() for room in inside)] == []
