"""Writes, when the process ends, what its virtual GPUs held: PyTorch's own counters and the driver's books.

PyTorch's peaks start anew when a script resets them, so they are collected before each reset.
"""

import atexit
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

_PEAKS = ("allocated_bytes.all.peak", "active_bytes.all.peak", "reserved_bytes.all.peak")
_COUNTERS = ("num_alloc_retries", "num_ooms")
_collected: dict[int, dict[str, int]] = {}


class _Books(ctypes.Structure):
    _fields_ = (
        ("total_bytes", ctypes.c_size_t),
        ("used_bytes", ctypes.c_size_t),
        ("peak_used_bytes", ctypes.c_size_t),
        ("process_bytes", ctypes.c_size_t),
        ("peak_process_bytes", ctypes.c_size_t),
        ("context_bytes", ctypes.c_size_t),
        ("nccl_bytes", ctypes.c_size_t),
        ("pinned_bytes", ctypes.c_size_t),
        ("peak_pinned_bytes", ctypes.c_size_t),
        ("allocations", ctypes.c_uint64),
        ("refusals", ctypes.c_uint64),
    )


def read_books(device: int) -> dict[str, int] | None:
    """The driver's books on a device; None if there is no such device."""
    books = _Books()
    if ctypes.CDLL(os.environ["VGPU_LIBRARY"]).vgpu_read_books(device, ctypes.byref(books)) != 0:
        return None
    return {name: getattr(books, name) for name, *_ in _Books._fields_}


def _collect(torch: Any) -> None:
    """Keeps the largest of each peak, and of each counter, which only a script can set back."""
    if not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(device)
        kept = _collected.setdefault(device, {})
        for name in (*_PEAKS, *_COUNTERS):
            kept[name] = max(kept.get(name, 0), stats.get(name, 0))


def collect_before_resets(_: Any) -> None:
    """Changes PyTorch, right after ``torch.cuda.memory`` is imported, so that no peak is lost."""
    torch = sys.modules["torch"]
    bindings: Any = torch._C
    for name in ("_cuda_resetPeakMemoryStats", "_cuda_resetAccumulatedMemoryStats", "_accelerator_resetPeakStats"):
        reset = getattr(bindings, name, None)
        if reset is None:
            continue

        def collect_and_reset(*args: Any, _reset: Any = reset) -> Any:
            _collect(torch)
            return _reset(*args)

        setattr(bindings, name, collect_and_reset)


def _write(folder: Path) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return
    _collect(torch)
    devices = []
    for device, kept in sorted(_collected.items()):
        books = read_books(device)
        if books and books["process_bytes"]:
            figures = {name.replace(".all.", "_").replace("bytes_peak", "peak_bytes"): n for name, n in kept.items()}
            devices.append({"device": device, **figures, **books})
    if devices:
        name = f"{os.getpid()}.json"
        (folder / f".{name}").write_text(json.dumps({"pid": os.getpid(), "argv": sys.argv, "devices": devices}))
        (folder / f".{name}").rename(folder / name)


def report_at_exit() -> None:
    """Arranges the report if ``VGPU_REPORT_FOLDER`` names where to."""
    folder = os.environ.get("VGPU_REPORT_FOLDER")
    if folder:
        atexit.register(_write, Path(folder))
