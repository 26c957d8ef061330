"""Seconds per iteration over the measured window. The device is synchronised at the window's edges only."""

import time
from typing import Protocol

import torch


class IterationTimer(Protocol):
    def start(self) -> None:
        """Open the window: everything before is finished and does not count."""

    def lap(self) -> None:
        """An iteration has been issued."""

    def stop(self) -> tuple[float, ...] | None:
        """Close the window and give one duration in seconds per lap; None where time is not measured."""


class CudaTimer:
    """CUDA events between the iterations; the host never waits for the device inside the window."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        torch.cuda.synchronize()
        self._events = []
        self.lap()

    def lap(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def stop(self) -> tuple[float, ...]:
        torch.cuda.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return tuple(first.elapsed_time(second) / 1000 for first, second in pairs)


class CpuTimer:
    def __init__(self) -> None:
        self._times: list[float] = []

    def start(self) -> None:
        self._times = [time.perf_counter()]

    def lap(self) -> None:
        self._times.append(time.perf_counter())

    def stop(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self._times, self._times[1:], strict=False))


class NoTimer:
    """The virtual device: kernels do nothing, so that a duration would mean nothing."""

    def start(self) -> None:
        torch.cuda.synchronize()

    def lap(self) -> None:
        pass

    def stop(self) -> None:
        torch.cuda.synchronize()
