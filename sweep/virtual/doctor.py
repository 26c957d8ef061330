"""Says, step by step, whether this machine and interpreter can have virtual GPUs."""

import os
import subprocess
import sys
from collections.abc import Callable

from sweep.virtual.build import compiler, library_folder, machine_obstacle
from sweep.virtual.environment import environment
from sweep.virtual.errors import VirtualGpuError
from sweep.virtual.profiles import gpu
from sweep.virtual.torch_build import torch_build

_TRIAL = """
import torch
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print(torch.cuda.get_device_name(), torch.cuda.memory_allocated() >> 20, "MiB allocated")
"""


def _machine() -> str:
    if obstacle := machine_obstacle():
        raise VirtualGpuError(obstacle)
    return f"{os.uname().sysname} {os.uname().machine}, compiler {compiler()}"


def _torch() -> str:
    build = torch_build()
    return f"PyTorch {build.version}, built for CUDA {build.cuda}, in {build.folder}"


def _library() -> str:
    return f"built in {library_folder()}"


def _trial() -> str:
    variables = environment(gpu("a100-80gb"))
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise VirtualGpuError(f"A trial process failed; please report what it said:\n{done.stderr.strip()}")
    return f"a trial process had {done.stdout.strip()}"


_STEPS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("machine", _machine),
    ("PyTorch", _torch),
    ("library", _library),
    ("trial", _trial),
)


def _passes(name: str, step: Callable[[], str]) -> bool:
    try:
        print(f"{name:8} ok    {step()}")
    except VirtualGpuError as error:
        print(f"{name:8} no    {error}")
        return False
    return True


def doctor() -> int:
    """Prints a line a step and stops at the first that fails; returns 0 if all is well."""
    if not all(_passes(name, step) for name, step in _STEPS):
        return 1
    print("This machine can have virtual GPUs.")
    return 0
