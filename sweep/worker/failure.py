"""What an exception in a rank means: the device was full, the host was full, or something else went wrong."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from sweep.measure.memory import PhaseMemory
from sweep.record import Failure

LOW_SHARE, LOW_BYTES = 0.03, 256 << 20
"""A device has really run low where less than this is free; NCCL and cuBLAS take up to some hundred MiB at once."""

DEVICE_IS_FULL = re.compile(
    r"CUDA (driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)|INTERNAL ASSERT FAILED.*CUDACachingAllocator"
    r"|out of memory|unhandled cuda error",
    re.IGNORECASE | re.DOTALL,
)
"""What is said when the device is full, and now and then also when something else is wrong."""

HOST_IS_FULL = re.compile(
    r"DefaultCPUAllocator: (can't|not enough) (allocate )?memory|Cannot allocate memory|bad_alloc|unable to mmap"
)
NEVER_MEMORY = re.compile(r"illegal memory access|misaligned address|device-side assert|out of resource", re.IGNORECASE)


class Cause(Enum):
    DEVICE_MEMORY = "device memory"
    HOST_MEMORY = "host memory"
    OTHER = "other"


class NotInEffectError(RuntimeError):
    """The configuration does not do what it says: a figure measured under it would be a wrong one."""


@dataclass(frozen=True, slots=True)
class Free:
    """What a device has left; None where neither CUDA nor NVML answers any more."""

    free_bytes: int | None
    capacity_bytes: int

    @property
    def is_low(self) -> bool:
        return self.free_bytes is not None and self.free_bytes < max(LOW_BYTES, LOW_SHARE * self.capacity_bytes)


def cause_of(error: BaseException, free: Free | None) -> Cause:
    """`free` is the device's; None on the CPU device, whose memory is the host's."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return Cause.DEVICE_MEMORY
    if NEVER_MEMORY.search(text):
        return Cause.OTHER
    if isinstance(error, MemoryError) or HOST_IS_FULL.search(text):
        return Cause.DEVICE_MEMORY if free is None else Cause.HOST_MEMORY
    if free is None or not DEVICE_IS_FULL.search(text):
        return Cause.OTHER
    if free.is_low:
        return Cause.DEVICE_MEMORY
    # Pinning host memory fails with the device's words while the device is nearly empty.
    plain = "error: out of memory" in text.lower() and free.free_bytes is not None
    return Cause.HOST_MEMORY if plain else Cause.OTHER


def free_memory(device: torch.device, capacity_bytes: int, otherwise: Callable[[], int | None]) -> Free:
    """Asked of CUDA; of `otherwise` where its context is beyond use after the error."""
    try:
        return Free(torch.cuda.mem_get_info(device)[0], capacity_bytes)
    except RuntimeError:
        return Free(otherwise(), capacity_bytes)


class RefusedRequest:
    """What the allocator last asked of the device in vain, in bytes, from PyTorch's own out-of-memory observer.

    That is the tensor's size rounded up to what the allocator requests, for large ones a multiple of 2 MiB.
    """

    def __init__(self) -> None:
        self.requested_bytes: int | None = None

    def watch(self) -> None:
        """From now on. Where this torch has no observer the message's rounded figure remains."""
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self._note)

    def _note(self, _device: int, requested: int, *_: object) -> None:
        self.requested_bytes = requested

    def exactly(self, rounded: int | None) -> int | None:
        """The exact size, where it is the one that the message tells of, rounded to two or three digits."""
        exact = self.requested_bytes
        return exact if exact and rounded and abs(exact - rounded) <= 0.01 * rounded else rounded


def describe_failure(
    error: Exception,
    rank: int,
    memory: PhaseMemory,
    iteration: int | None,
    device: torch.device | None,
    free: Free | None,
    refused: RefusedRequest,
) -> Failure:
    return Failure(
        kind=type(error).__name__,
        message=str(error).split("\n\n")[0][:2000],
        phase=memory.phase,
        iteration=iteration,
        rank=rank,
        requested_bytes=refused.exactly(requested_bytes(str(error))),
        free_bytes=None if free is None else free.free_bytes,
        allocated_bytes=None if device is None else torch.cuda.memory_allocated(device),
        reserved_bytes=None if device is None else torch.cuda.memory_reserved(device),
    )


def requested_bytes(message: str) -> int | None:
    """The size in PyTorch's messages: `Tried to allocate 1.96 GiB` (GPU, rounded), `tried to allocate 9 bytes` (CPU)"""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    if not found:
        return None
    unit = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[found.group(2)]
    return round(float(found.group(1)) * unit)
