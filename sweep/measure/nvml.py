"""Device memory as the driver sees it, sampled in a thread."""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from sweep.nvml import Device, Nvml, NvmlError
from sweep.record import NvmlMemory, NvmlTrace, Phase, PhaseStart

PERIOD_SECONDS = 0.02
TRACE_POINTS = 400


class NvmlSampler:
    """Samples one device's used memory from `bind` to the end.

    Make it before CUDA starts: the baseline of every device is read then, and holds nothing of this process. Which of
    them is this rank's is known once CUDA names the UUID: neither an index nor CUDA_VISIBLE_DEVICES is trusted for
    it. `result` is None where NVML does not answer.
    """

    def __init__(self, *, enabled: bool = True, period_seconds: float = PERIOD_SECONDS) -> None:
        self._period_seconds = period_seconds
        self._nvml: Nvml | None = None
        self._device: Device | None = None
        self._baselines: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._baseline = 0
        self._samples: list[tuple[float, int]] = []
        self._phases: list[tuple[float, Phase]] = []
        self._process_bytes: int | None = None
        if enabled:
            with suppress(NvmlError):
                self._nvml = Nvml()
                for device in self._nvml.devices():
                    self._baselines[device.uuid] = device.used_bytes()
                for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","):
                    if entry.startswith("MIG-"):  # an instance of a GPU is not among the whole ones
                        self._baselines[entry] = self._nvml.device(entry).used_bytes()
        self._start = time.monotonic()

    def bind(self, uuid: str) -> str | None:
        """Follow the device that CUDA calls `uuid`, with or without its prefix. Gives the UUID in full."""
        if self._nvml is None:
            return None
        for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
            try:
                device = self._nvml.device(name)
                self._baseline = self._baselines.get(device.uuid, device.used_bytes())
            except NvmlError:
                continue
            self._device = device
            self._thread.start()
            return device.uuid
        return None

    def sample(self) -> None:
        """Take a sample now, besides the periodic ones."""
        if self._device is not None:
            with suppress(NvmlError):
                self._samples.append((time.monotonic() - self._start, self._device.used_bytes()))

    def enter(self, phase: Phase) -> None:
        """From now on it is this phase, until the next."""
        if self._device is not None:
            self._phases.append((time.monotonic() - self._start, phase))

    def _run(self) -> None:
        while not self._stop.wait(self._period_seconds):
            self.sample()

    def finish(self) -> None:
        """Take the last sample, and read what of it is this process's own."""
        self.sample()
        if self._device is not None:
            with suppress(NvmlError):
                mine = [process for process in self._device.processes() if process.pid == os.getpid()]
                self._process_bytes = mine[0].used_bytes if mine else None

    def free_bytes(self) -> int | None:
        """What the device has left, for when CUDA itself no longer answers."""
        if self._device is None:
            return None
        with suppress(NvmlError):
            return self._device.free_bytes()
        return None

    def __enter__(self) -> "NvmlSampler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def result(self) -> NvmlMemory | None:
        if self._device is None:
            return None
        return NvmlMemory(
            baseline_bytes=self._baseline,
            peak_bytes=max([self._baseline, *(used for _, used in self._samples)]),
            samples=len(self._samples),
            period_seconds=self._period_seconds,
            info_version=self._device.memory_info_version,
            process_bytes=self._process_bytes,
            trace=trace_of([(0.0, self._baseline), *sorted(self._samples)], self._phases),
        )


def trace_of(
    samples: Sequence[tuple[float, int]], phases: Sequence[tuple[float, Phase]], points: int = TRACE_POINTS
) -> NvmlTrace:
    """Thin out samples (seconds, bytes) and starts of phases, both in order of time, to at most `points` each.

    The first and the last sample stay; so does the highest of each of `points` - 2 equal spans in between. Within a run
    of equal figures only its ends are kept, which draws the same line.
    """
    end = max(samples[-1][0], phases[-1][0] if phases else 0.0)

    def span(seconds: float) -> int:
        return min(points - 3, int((points - 2) * seconds / end)) if end else 0

    highest: dict[int, tuple[float, int]] = {}
    for sample in samples[1:-1]:
        if (known := highest.get(span(sample[0]))) is None or sample[1] > known[1]:
            highest[span(sample[0])] = sample
    kept = [samples[0], *highest.values(), *samples[1:][-1:]]
    around = [{used for _, used in kept[max(0, i - 1) : i + 2]} for i in range(len(kept))]
    kept = [sample for i, sample in enumerate(kept) if i in (0, len(kept) - 1) or len(around[i]) > 1]
    starts = {span(seconds): PhaseStart(phase=phase, seconds=round(seconds, 4)) for seconds, phase in phases}
    return NvmlTrace(
        seconds=tuple(round(seconds, 4) for seconds, _ in kept),
        used_bytes=tuple(used for _, used in kept),
        phases=tuple(starts.values()),
    )
