"""Where a cell runs: which device, which software. Read without importing torch or touching CUDA.

`identity` is the part that decides a result and enters `cell_id`; `describe` is everything a reader may want.
"""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sweep import virtual
from sweep.nvml import Device, Nvml, NvmlError
from sweep.spec import DeviceKind, DeviceSpec

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed")


class DeviceError(Exception):
    """The wanted device is not to be had; one sentence that says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A real GPU that this process may use, in CUDA's order."""

    name: str
    uuid: str


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed torch was built for, such as `13.0`; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*=\s*'([^']+)'", text, re.MULTILINE)
    return found.group(1) if found else None


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; by UUID, since NVML's order is not CUDA's."""
    try:
        nvml = Nvml()
        gpus = [_gpu(device) for device in nvml.devices()]
    except NvmlError:
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    visible: list[Gpu] = []
    for entry in filter(None, (part.strip() for part in chosen.split(","))):
        found = _named(entry, gpus, nvml)
        if found is None:  # CUDA ignores everything from the first entry on that it does not know
            break
        visible.append(found)
    return visible


def _named(entry: str, gpus: list[Gpu], nvml: Nvml) -> Gpu | None:
    """What one entry of CUDA_VISIBLE_DEVICES means: an index, the beginning of a UUID, or an instance of a GPU."""
    if entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        try:
            return _gpu(nvml.device(entry))
        except NvmlError:
            return None
    return next((gpu for gpu in gpus if gpu.uuid.startswith(entry)), None)


def _gpu(device: Device) -> Gpu:
    return Gpu(name=device.name, uuid=device.uuid)


def driver_version() -> str | None:
    try:
        return Nvml().driver_version
    except NvmlError:
        return None


def choose_device() -> tuple[DeviceKind, str]:
    """What `device=auto` means here, and why."""
    gpus, cuda = visible_gpus(), torch_cuda_version()
    if gpus and cuda:
        return DeviceKind.CUDA, f"{len(gpus)} x {gpus[0].name}"
    missing = "no NVIDIA GPU is visible" if not gpus else "the installed torch is a CPU build"
    problem = virtual.check()
    if problem is None:
        return DeviceKind.VIRTUAL, missing
    return DeviceKind.CPU, f"{missing}, and the virtual GPU is not available: {problem}"


def require_device(kind: DeviceKind, world_size: int | None) -> int:
    """The world size to use on this device. Raises `DeviceError` where it cannot be had."""
    if kind is DeviceKind.VIRTUAL:
        problem = virtual.check()
        if problem is not None:
            raise DeviceError(f"device=virtual cannot be used: {problem.rstrip('.')}; choose device=cpu.")
        return world_size or 8
    if kind is DeviceKind.CPU:
        return world_size or 2
    if torch_cuda_version() is None:
        raise DeviceError("device=cuda cannot be used: the installed torch is a CPU build; choose device=cpu.")
    gpus = visible_gpus()
    if not gpus:
        raise DeviceError("device=cuda cannot be used: no NVIDIA GPU is visible; choose device=virtual.")
    if world_size and world_size > len(gpus):
        raise DeviceError(f"world_size={world_size} needs as many GPUs, but {len(gpus)} are visible.")
    return world_size or len(gpus)


def require_host_memory(parameters: int, bytes_per_parameter: int, world_size: int, model: str) -> None:
    """Refuse a model whose weights, gradients and optimizer states alone exceed this host's memory."""
    needed = parameters * bytes_per_parameter * world_size
    total = psutil.virtual_memory().total
    if needed > total:
        raise DeviceError(
            f"model={model} cannot be trained on this host's CPU: {world_size} ranks need at least "
            f"{needed / 2**30:.0f} GiB for weights, gradients and optimizer states, and the host has "
            f"{total / 2**30:.0f} GiB; choose model=tiny or device=virtual."
        )


def identity(device: DeviceSpec) -> dict[str, object]:
    """What decides a result besides the spec."""
    facts: dict[str, object] = {name: version(name) for name in LIBRARIES}
    if device.kind is DeviceKind.CUDA:
        facts |= {"gpus": [gpu.name for gpu in visible_gpus()], "driver": driver_version()}
    elif device.gpu is not None:
        facts["virtual_gpu"] = virtual.fingerprint(virtual.gpus()[device.gpu.key])
    elif device.kind is DeviceKind.CPU:
        facts |= {"processor": platform.machine(), "cores": os.cpu_count()}
    return facts


def describe(device: DeviceSpec) -> dict[str, Any]:
    from sweep import __version__

    return identity(device) | {
        "sweep": __version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "torch_cuda": torch_cuda_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "host_memory_bytes": psutil.virtual_memory().total,
    }


@functools.cache
def git_commit() -> str | None:
    """Commit of this project's own checkout, with `+changes` where files differ from it."""
    folder = str(Path(__file__).resolve().parent)

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
