"""Device memory as the driver sees it, sampled in a thread."""

import threading
from types import TracebackType
from typing import Any

import pynvml

from sweep.environment import visible_gpus
from sweep.record import NvmlMemory

PERIOD_SECONDS = 0.02


class NvmlSampler:
    """Samples one device's used memory (memory info v2, which leaves out what the driver reserves) from `start` on.

    The device is found by UUID: NVML's order is not CUDA's. Make it before CUDA starts, so that the baseline holds
    nothing of this process. `result` is None where NVML does not answer.
    """

    def __init__(self, local_rank: int, *, enabled: bool = True, period_seconds: float = PERIOD_SECONDS) -> None:
        self._period_seconds = period_seconds
        self._handle: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._samples = 0
        self.uuid: str | None = None
        gpus = visible_gpus() if enabled else []
        if local_rank < len(gpus):
            pynvml.nvmlInit()
            self.uuid = gpus[local_rank].uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
            self._baseline = self._peak = self._used()

    def _used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2).used)

    def sample(self) -> None:
        """Take a sample now, besides the periodic ones."""
        if self._handle is not None:
            self._peak = max(self._peak, self._used())
            self._samples += 1

    def _run(self) -> None:
        while not self._stop.wait(self._period_seconds):
            self.sample()

    def __enter__(self) -> "NvmlSampler":
        if self._handle is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def result(self) -> NvmlMemory | None:
        if self._handle is None:
            return None
        return NvmlMemory(
            baseline_bytes=self._baseline,
            peak_bytes=self._peak,
            samples=self._samples,
            period_seconds=self._period_seconds,
        )
