"""The few questions that are asked of NVML, straight from the driver's library: no package is needed for it.

Everything goes by UUID, because NVML's order of devices is not CUDA's. Memory is read in version 2 of the structure,
whose `used` leaves out what the driver keeps for itself; drivers before 510 have version 1 alone, where it counts as
used. Which one it was is recorded beside the figures. https://docs.nvidia.com/deploy/nvml-api/
"""

import ctypes
from contextlib import nullcontext, suppress
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_NOT_AVAILABLE = ctypes.c_ulonglong(-1).value
_INSUFFICIENT_SIZE = 7


class NvmlError(Exception):
    """NVML is missing, or does not answer this."""


class _Memory1(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Memory2(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process that computes on a device, as far as it is visible from here."""

    pid: int
    used_bytes: int | None
    """None where the driver does not tell, as in containers; never 0 for unknown."""


class Device:
    def __init__(self, nvml: "Nvml", handle: ctypes.c_void_p) -> None:
        self._nvml = nvml
        self._handle = handle
        self._version: int | None = None

    def _text(self, function: str) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._nvml.call(function, self._handle, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode()

    @property
    def name(self) -> str:
        return self._text("nvmlDeviceGetName")

    @property
    def uuid(self) -> str:
        return self._text("nvmlDeviceGetUUID")

    @property
    def memory_info_version(self) -> int:
        """Of the structure that memory is read in: 2, or 1 where the driver has no other."""
        if self._version is None:
            self._memory()
        assert self._version is not None
        return self._version

    def _memory(self) -> _Memory1 | _Memory2:
        if self._version != 1:
            with suppress(NvmlError) if self._version is None else nullcontext():
                second = _Memory2(version=ctypes.sizeof(_Memory2) | 2 << 24)
                self._nvml.call("nvmlDeviceGetMemoryInfo_v2", self._handle, ctypes.byref(second))
                self._version = 2  # from now on: figures of two versions do not mix
                return second
        first = _Memory1()
        self._nvml.call("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(first))
        self._version = 1
        return first

    def used_bytes(self) -> int:
        return int(self._memory().used)

    def total_bytes(self) -> int:
        return int(self._memory().total)

    def free_bytes(self) -> int:
        """Less than what is not used by processes: the driver keeps some for itself."""
        return int(self._memory().free)

    def processes(self) -> list[Process]:
        """Empty also where the processes are in another container, and where the driver is too old to tell."""
        for function in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
            if self._nvml.has(function):
                return self._processes(function)
        return []

    def _processes(self, function: str) -> list[Process]:
        count = ctypes.c_uint(64)
        while True:
            entries = (_Process * count.value)()
            try:
                self._nvml.call(function, self._handle, ctypes.byref(count), ctypes.byref(entries))
            except NvmlError as error:
                if error.args[1] != _INSUFFICIENT_SIZE:
                    raise
                count.value *= 2
                continue
            return [
                Process(pid=entry.pid, used_bytes=None if entry.used == _NOT_AVAILABLE else entry.used)
                for entry in entries[: count.value]
            ]


class Nvml:
    """The library, initialised for as long as this process lives. Raises `NvmlError` where there is none."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError(str(error), None) from error
        self.call("nvmlInit_v2")

    def call(self, function: str, *arguments: object) -> None:
        try:
            code = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise NvmlError(f"{function}: this driver does not have it", None) from None
        if code:
            raise NvmlError(f"{function}: NVML error {code}", code)

    def has(self, function: str) -> bool:
        return hasattr(self._library, function)

    @property
    def driver_version(self) -> str:
        buffer = ctypes.create_string_buffer(96)
        self.call("nvmlSystemGetDriverVersion", buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode()

    def devices(self) -> list[Device]:
        """Whole GPUs, in NVML's order."""
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            found.append(Device(self, handle))
        return found

    def device(self, uuid: str) -> Device:
        """A GPU, or an instance of one (`MIG-...`)."""
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return Device(self, handle)
