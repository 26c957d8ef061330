"""What a process asks of its virtual GPU, call by call: the facts that an estimate of time is made from.

>>> trace = Trace()
>>> trace.start()
>>> ...  # an iteration; around operation number n of the framework: trace.begin(n), trace.end()
>>> calls = trace.stop()

Only for a process that has a virtual GPU. See ``native/trace.c``.
"""

import ctypes
import os
from collections.abc import Sequence
from enum import IntEnum


class CallKind(IntEnum):
    """In the order of ``native/trace.h``."""

    KERNEL = 0
    MATMUL = 1
    COPY = 2
    COLLECTIVE = 3
    RECORD = 4
    WAIT = 5
    HOST_WAITS_FOR_EVENT = 6
    HOST_WAITS_FOR_STREAM = 7
    HOST_WAITS_FOR_ALL = 8


COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "send")
"""By the ``type`` of a collective call."""
OVER_PCIE = 1
"""The ``type`` of a copy between the host and the device."""


class Call(ctypes.Structure):
    """One call. ``stream`` and ``event`` are names without a meaning of their own.

    ``amount`` is threads (kernels), floating-point operations (matrix products), or bytes; of a collective those of
    the whole, over all ranks. ``count`` is output tiles of 128 x 128 (matrix products) or ranks (collectives).
    ``operation`` is the last one that began before; ``within`` says that it made this call. ``follows``: the
    collective is in the same group of NCCL calls as the one before.
    """

    _fields_ = (
        ("stream", ctypes.c_uint64),
        ("event", ctypes.c_uint64),
        ("amount", ctypes.c_double),
        ("operation", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("kind", ctypes.c_uint8),
        ("type", ctypes.c_uint8),
        ("within", ctypes.c_uint8),
        ("follows", ctypes.c_uint8),
    )


class Trace:
    """The one trace of this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["VGPU_LIBRARY"])
        self._library.vgpu_trace_stop.restype = ctypes.c_size_t
        self.begin = self._library.vgpu_trace_begin
        self.end = self._library.vgpu_trace_end

    def start(self) -> None:
        """Forgets an earlier trace."""
        self._library.vgpu_trace_start()

    def stop(self) -> Sequence[Call]:
        """The calls since the start; they stay valid until the next one."""
        first = ctypes.POINTER(Call)()
        count = self._library.vgpu_trace_stop(ctypes.byref(first))
        return first[:count]
