"""Runs a command on virtual GPUs and says what they held."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweep.virtual.environment import environment
from sweep.virtual.errors import VirtualGpuError
from sweep.virtual.profiles import GpuProfile

_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "mpirun", "mpiexec", "srun")
_GIB = 1 << 30


def _refuse_launcher(command: Sequence[str]) -> None:
    name = Path(command[0]).name
    is_module = len(command) > 2 and command[1] == "-m" and command[2] == "torch.distributed.run"
    if name in _LAUNCHERS or is_module:
        raise VirtualGpuError(
            f"{'torch.distributed.run' if is_module else name} would start one process a GPU; give the training "
            "command itself (python train.py ...), the virtual GPU plays the other ranks."
        )


def _largest_report(folder: Path) -> dict[str, Any] | None:
    """The report of the process that held the most: a command may start others that touch a GPU too."""
    reports: list[dict[str, Any]] = [
        json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("[0-9]*.json")
    ]
    return max(reports, key=lambda report: report["devices"][0]["peak_process_bytes"], default=None)


def run(
    command: Sequence[str],
    gpu: GpuProfile,
    *,
    gpus: int | None = None,
    world_size: int | None = None,
    other_processes_bytes: int = 0,
    lag: str,
) -> dict[str, Any]:
    """Runs the command to its end and returns the report: the settings, the exit code and the figures of each device.

    ``devices`` is empty if the command used no GPU or was killed.
    """
    _refuse_launcher(command)
    variables = environment(gpu, gpus=gpus, world_size=world_size, other_processes_bytes=other_processes_bytes, lag=lag)
    with tempfile.TemporaryDirectory(prefix="sweep-virtual-") as folder:
        try:
            done = subprocess.run(command, env={**os.environ, **variables, "VGPU_REPORT_FOLDER": folder}, check=False)
        except FileNotFoundError as error:
            raise VirtualGpuError(f"There is no command {command[0]!r}; give one that exists after '--'.") from error
        report = _largest_report(Path(folder)) or {"devices": []}
    return {
        "command": list(command),
        "exit_code": done.returncode,
        "gpu": gpu.key,
        "gpu_name": gpu.name,
        "context_bytes_is_assumed": gpu.context_bytes is None,
        "world_size": world_size,
        "other_processes_bytes": other_processes_bytes,
        "lag": lag,
        "fits": verdict(report["devices"], done.returncode),
        "devices": report["devices"],
    }


def verdict(devices: Sequence[dict[str, Any]], exit_code: int) -> str | None:
    """``yes``, ``retries`` (it fits, but only because the allocator gave back and asked again), ``no``; None if the
    command used no GPU or failed for another reason than memory."""
    if any(device["num_ooms"] for device in devices):
        return "no"
    if exit_code != 0 or not devices:
        return None
    return "retries" if any(device["num_alloc_retries"] for device in devices) else "yes"


def screen(report: dict[str, Any]) -> str:
    """The report for people."""
    devices = report["devices"]
    if not devices:
        return "virtual GPU: the command used no GPU through PyTorch, or was killed before it could report."
    lines = [f"virtual GPU: {report['gpu_name']}, lag {report['lag']}; memory is PyTorch's own, time is not measured"]
    header = ("GPU", "allocated", "active", "reserved", "NVML used", "of total", "retries", "OOMs")
    lines.append("".join(f"{name:>11}" for name in header) + "   (peaks, GiB)")
    for device in devices:
        peaks = [device[f"{name}_peak_bytes"] for name in ("allocated", "active", "reserved")]
        sizes = [*peaks, device["peak_used_bytes"], device["total_bytes"]]
        row = [str(device["device"]), *(f"{size / _GIB:.2f}" for size in sizes)]
        lines.append("".join(f"{cell:>11}" for cell in (*row, device["num_alloc_retries"], device["num_ooms"])))
    sentence = {
        "yes": "It fits.",
        "retries": "It fits only barely: the allocator had to give memory back and ask again, which is slow.",
        "no": "It does not fit: PyTorch ran out of memory.",
        None: f"The command failed with exit code {report['exit_code']}, and not for want of GPU memory.",
    }
    lines.append(sentence[report["fits"]])
    if report["context_bytes_is_assumed"]:
        lines.append("The size of this GPU's CUDA context is not known: 500 MiB are assumed.")
    return "\n".join(lines)
