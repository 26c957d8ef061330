"""Peak memory by phase, from counters that the allocator (GPU) or the kernel (CPU) keeps; nothing is sampled."""

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from sweep.record import MemoryPeak, Phase


class Counters(Protocol):
    def reset(self) -> None:
        """Let the peaks start from the current figures."""

    def read(self) -> MemoryPeak:
        """The peaks since the last reset."""


class PhaseMemory:
    """Every moment belongs to one phase: `enter` closes the phase before it.

    `others` are further devices of the same process, which enter the same phases.
    """

    def __init__(self, counters: Counters, others: Sequence["PhaseMemory"] = ()) -> None:
        self.counters = counters
        self.others = tuple(others)
        self.phase: Phase | None = None
        self.peaks: dict[Phase, MemoryPeak] = {}

    def enter(self, phase: Phase | None) -> None:
        self.fold()
        self.phase = phase
        self.counters.reset()
        for other in self.others:
            other.enter(phase)

    def fold(self) -> None:
        """Take the running phase's peaks into account without leaving it."""
        for other in self.others:
            other.fold()
        if self.phase is None:
            return
        new, old = self.counters.read(), self.peaks.get(self.phase)
        if old is not None:
            active = None if new.active_bytes is None else max(new.active_bytes, old.active_bytes or 0)
            new = MemoryPeak(
                allocated_bytes=max(new.allocated_bytes, old.allocated_bytes),
                active_bytes=active,
                reserved_bytes=max(new.reserved_bytes, old.reserved_bytes),
            )
        self.peaks[self.phase] = new


@dataclass(frozen=True, slots=True)
class CudaCounters:
    """PyTorch's caching allocator: `allocated_bytes.all.peak` and its siblings of torch.cuda.memory_stats."""

    device: torch.device

    def stats(self) -> Any:
        return torch.cuda.memory_stats_as_nested_dict(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> MemoryPeak:
        stats = self.stats()
        if not stats:  # CUDA has not been initialised
            return MemoryPeak(allocated_bytes=0, active_bytes=0, reserved_bytes=0)
        return MemoryPeak(
            allocated_bytes=stats["allocated_bytes"]["all"]["peak"],
            active_bytes=stats["active_bytes"]["all"]["peak"],
            reserved_bytes=stats["reserved_bytes"]["all"]["peak"],
        )

    def alloc_retries(self) -> int:
        return int(self.stats()["num_alloc_retries"])

    def ooms(self) -> int:
        return int(self.stats()["num_ooms"]) if self.stats() else 0

    def segments(self) -> int:
        """That the allocator holds now."""
        return int(self.stats()["segment"]["all"]["current"]) if self.stats() else 0

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device)


class CpuCounters:
    """The kernel's high-water marks of this process, above what it held when this object was made.

    Allocated is resident memory (VmHWM, reset at phase edges through /proc/self/clear_refs) without pages of files: a
    library's code becomes resident when it is first run, but was mapped when it was imported. Reserved is mapped
    address space (VmPeak), the figure that the limit of `limit_memory` counts; the kernel never resets it, so that a
    phase's reserved figure is the highest up to and including that phase. See proc(5).
    """

    def __init__(self) -> None:
        self.reset()
        self._resident = _status_bytes("VmRSS")
        self._files = _status_bytes("RssFile")
        self._mapped = _status_bytes("VmSize")
        self._mapped_before = _status_bytes("VmPeak")

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def read(self) -> MemoryPeak:
        files = _status_bytes("RssFile") - self._files
        highest = _status_bytes("VmPeak")
        if highest == self._mapped_before:  # from before this object was made, and not exceeded since
            highest = _status_bytes("VmSize")
        return MemoryPeak(
            allocated_bytes=max(0, _status_bytes("VmHWM") - self._resident - files),
            active_bytes=None,
            reserved_bytes=max(0, highest - self._mapped),
        )

    def limit_memory(self, limit_bytes: int) -> None:
        """From here on, mapping more than this above the baseline fails (RLIMIT_AS, setrlimit(2))."""
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (self._mapped + limit_bytes, hard))

    def lift_limit(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found.group(1)) * 1024
