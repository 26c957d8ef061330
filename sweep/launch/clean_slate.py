"""Before a cell on a real GPU: its memory must be free, or the cell would measure somebody else's.

What was in use when the sweep began is the baseline, as long as it is small. A process that was killed gives its memory
back seconds later, so this waits before it says that a device is busy.
"""

import time
from collections.abc import Sequence

import psutil

from sweep.environment import Gpu
from sweep.nvml import Device, Nvml, NvmlError

WAIT_SECONDS = 30.0
POLL_SECONDS = 0.5
TOLERANCE_BYTES = 64 << 20
SMALL_BYTES = 1 << 30
"""A baseline up to this, or a twentieth of the device, is a desktop or a driver; above it somebody computes."""

_baselines: dict[str, int] = {}


def busy_reason(gpus: Sequence[Gpu], *, wait_seconds: float | None = None) -> str | None:
    """Wait until the memory of all these devices is back at the sweep's baseline; else say who holds it."""
    deadline = time.monotonic() + (WAIT_SECONDS if wait_seconds is None else wait_seconds)
    while True:
        try:
            nvml = Nvml()
            busy = [(gpu, device) for gpu in gpus if _exceeds(gpu, device := nvml.device(gpu.uuid))]
            if not busy:
                return None
            if time.monotonic() >= deadline:
                return "; ".join(_who(gpu, device) for gpu, device in busy)
        except NvmlError:
            return None  # nothing can be known: the cell itself will say what it meets
        time.sleep(POLL_SECONDS)


def baseline_bytes(gpus: Sequence[Gpu]) -> dict[str, int]:
    """By UUID, what was in use when the sweep began."""
    return {gpu.uuid: _baselines[gpu.uuid] for gpu in gpus if gpu.uuid in _baselines}


def _exceeds(gpu: Gpu, device: Device) -> bool:
    used, small = device.used_bytes(), max(SMALL_BYTES, device.total_bytes() // 20)
    if gpu.uuid not in _baselines:
        if used > small:
            return True
        _baselines[gpu.uuid] = used
    # Less than ever: somebody has left, and the device is cleaner than when the sweep began.
    _baselines[gpu.uuid] = min(_baselines[gpu.uuid], used)
    return used > _baselines[gpu.uuid] + TOLERANCE_BYTES


def _who(gpu: Gpu, device: Device) -> str:
    held = ", ".join(_named(process.pid, process.used_bytes) for process in device.processes())
    who = held or "processes that are not visible from here, such as another container's"
    return f"{device.used_bytes() / 2**30:.1f} GiB of {gpu.name} ({gpu.uuid}) are held by {who}"


def _named(pid: int, used_bytes: int | None) -> str:
    try:
        name = psutil.Process(pid).name()
    except psutil.Error:
        name = "a process"
    return f"{name} (pid {pid})" if used_bytes is None else f"{name} (pid {pid}, {used_bytes / 2**30:.1f} GiB)"
