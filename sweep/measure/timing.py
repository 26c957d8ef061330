"""Seconds per iteration, and where they go. The device is synchronised at the edges of the measured window only."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from sweep.record import IterationParts


class Part(Enum):
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """One duration in seconds per measured iteration, whole and in parts."""

    seconds_per_iteration: tuple[float, ...]
    parts: IterationParts


class IterationTimer(Protocol):
    def start(self) -> None:
        """Open the window: everything before is finished and does not count."""

    def mark(self, part: Part) -> None:
        """From here on, until the next mark, it is this part of the iteration."""

    def lap(self) -> None:
        """An iteration has been issued."""

    def stop(self) -> Times | None:
        """Close the window; None where time is not measured."""


@dataclass(frozen=True, slots=True)
class Mark:
    part: Part | None
    """None: the edge between two iterations."""
    host: float
    """Seconds on the host's clock."""
    event: torch.cuda.Event | None = None


def times(marks: Sequence[Mark], device_seconds: Callable[[Mark, Mark], float]) -> Times:
    """Durations between marks, added up by iteration. The first and the last mark are edges."""
    iterations: list[float] = []
    parts: list[dict[Part, float]] = [dict.fromkeys(Part, 0.0)]
    edge = marks[0]
    for mark, following in itertools.pairwise(marks):
        if mark.part is Part.DATA:
            parts[-1][Part.DATA] += following.host - mark.host
        elif mark.part is not None:
            parts[-1][mark.part] += device_seconds(mark, following)
        if following.part is None:
            iterations.append(device_seconds(edge, following))
            edge = following
            parts.append(dict.fromkeys(Part, 0.0))
    by_part = {part: tuple(each[part] for each in parts[:-1]) for part in Part}
    return Times(
        seconds_per_iteration=tuple(iterations),
        parts=IterationParts(
            data_seconds=by_part[Part.DATA],
            forward_seconds=by_part[Part.FORWARD],
            backward_seconds=by_part[Part.BACKWARD],
            optimizer_seconds=by_part[Part.OPTIMIZER],
        ),
    )


class CudaTimer:
    """CUDA events at the edges; the host never waits for the device inside the window."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def start(self) -> None:
        torch.cuda.synchronize()
        self._marks = []
        self.lap()

    def mark(self, part: Part | None) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(Mark(part, time.perf_counter(), event))

    def lap(self) -> None:
        self.mark(None)

    def stop(self) -> Times:
        torch.cuda.synchronize()
        return times(self._marks, _between_events)


def _between_events(first: Mark, second: Mark) -> float:
    assert first.event is not None
    assert second.event is not None
    return float(first.event.elapsed_time(second.event)) / 1000


class CpuTimer:
    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def start(self) -> None:
        self._marks = []
        self.lap()

    def mark(self, part: Part | None) -> None:
        self._marks.append(Mark(part, time.perf_counter()))

    def lap(self) -> None:
        self.mark(None)

    def stop(self) -> Times:
        return times(self._marks, lambda first, second: second.host - first.host)


class NoTimer:
    """Outside the measured window, and on the virtual device: kernels do nothing there, a duration means nothing."""

    def start(self) -> None:
        torch.cuda.synchronize()

    def mark(self, part: Part) -> None:
        pass

    def lap(self) -> None:
        pass

    def stop(self) -> None:
        torch.cuda.synchronize()
