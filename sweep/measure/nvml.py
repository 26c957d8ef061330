"""Device memory as the driver sees it, sampled in a thread."""

import os
import threading
from contextlib import suppress
from types import TracebackType

from sweep.nvml import MEMORY_INFO_VERSION, Device, Nvml, NvmlError
from sweep.record import NvmlMemory

PERIOD_SECONDS = 0.02


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
        self._baseline = self._peak = self._samples = 0
        self._process_bytes: int | None = None
        if enabled:
            with suppress(NvmlError):
                self._nvml = Nvml()
                for device in self._nvml.devices():
                    self._baselines[device.uuid] = device.used_bytes()

    def bind(self, uuid: str) -> str | None:
        """Follow the device that CUDA calls `uuid`, with or without its prefix. Gives the UUID in full."""
        if self._nvml is None:
            return None
        for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
            try:
                device = self._nvml.device(name)
                # An instance of a GPU is not among the whole ones: its own first figure is its baseline.
                self._baseline = self._peak = self._baselines.get(device.uuid, device.used_bytes())
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
                self._peak = max(self._peak, self._device.used_bytes())
                self._samples += 1

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
            return self._device.total_bytes() - self._device.used_bytes()
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
            peak_bytes=self._peak,
            samples=self._samples,
            period_seconds=self._period_seconds,
            info_version=MEMORY_INFO_VERSION,
            process_bytes=self._process_bytes,
        )
