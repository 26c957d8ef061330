"""Counts what an iteration asks of the virtual GPU. Runs in the worker.

The virtual GPU notes every call: matrix products with their sizes, kernels, copies, collectives, events. Of a kernel it
knows the threads alone, so a dispatch mode watches PyTorch's operators beside it: the bytes of the tensors that an
operator reads and writes belong to the kernels that it launches. Views launch none. Backward passes and recomputation
are counted because they happen: autograd carries the mode to the threads in which they run.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sweep.estimate.work import OCCUPIES_STREAM, Kind, Step, Work
from sweep.virtual.trace import COLLECTIVES, OVER_PCIE, Call, CallKind, Trace

BYTES_PER_THREAD = 32
"""Of a kernel that no operator of PyTorch launched: an elementwise one reads and writes 16 bytes each in a thread."""

WRITTEN_ONLY = (
    "copy_",
    "zero_",
    "fill_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "_foreach_copy_",
)
"""Operators that write their first argument without reading it."""
READ_IN_PART = ("embedding", "index_select", "gather", "index", "nll_loss_forward", "take", "nll_loss_backward")
"""Operators that read no more of their first arguments than they write, or nearly nothing."""
HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Operation:
    """What one dispatched operator moves and computes."""

    bytes: float = 0.0
    attention_flops: float = 0.0
    detail: str = ""
    """The dtype class; of attention in 16 bits which implementation it is."""


class _Signature:
    """What an operator's schema says, looked up once."""

    def __init__(self, operator: Any) -> None:
        schema = operator._schema
        self.name = schema.name.split("::")[-1]
        self.arguments = [argument.name for argument in schema.arguments]
        writes = [bool(argument.alias_info and argument.alias_info.is_write) for argument in schema.arguments]
        # A fused optimizer may change gradients, and does only where it is given a scale.
        named = zip(self.arguments, writes, strict=True)
        self.mutated = frozenset(index for index, (name, write) in enumerate(named) if write and name != "grads")
        returned = [value.alias_info for value in schema.returns]
        self.is_view = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
        self.returns_new = any(alias is None for alias in returned)
        self.is_attention = "attention" in self.name
        self.is_backward = "backward" in self.name


_signature = functools.cache(_Signature)


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers the operators from 1 and keeps what each one moves."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self.operations: list[Operation | None] = [None]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        number = len(self.operations)
        self.operations.append(None)
        self._trace.begin(number)
        try:
            result = operator(*args, **kwargs)
        finally:
            self._trace.end()
        signature = _signature(operator)
        if not signature.is_view:
            self.operations[number] = operation_of(signature, args, kwargs, result)
        return result


def operation_of(signature: _Signature, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Operation:
    """The bytes that an operator reads and writes, by its tensors; and the flops of attention, by its shapes."""
    given = [*args, *kwargs.values()]
    written = sum(_bytes(args[index]) for index in signature.mutated if index < len(args))
    written += sum(_bytes(kwargs.get(signature.arguments[i])) for i in signature.mutated if i >= len(args))
    if signature.returns_new:
        written += _bytes(result)
    read = 0.0 if signature.name in ("nll_loss_forward", "nll_loss_backward") else sum(map(_bytes, given))
    if signature.name in WRITTEN_ONLY:
        read -= written
    elif signature.name in READ_IN_PART:
        read = min(read, written)
    found = Operation(bytes=read + written, detail=_dtype_class(given))
    if signature.is_attention:
        found.attention_flops = attention_flops(signature, args, kwargs)
        how = next((how for how in ("flash", "efficient", "cudnn") if how in signature.name), "other")
        found.detail = how if found.detail == "half" else found.detail
    return found


def attention_flops(signature: _Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Two products of `queries x keys` each over the head size, halved where causal; backward five for two.

    FlashAttention-2 (arXiv:2307.08691), section 4.1, counts the same.
    """
    named = dict(zip(signature.arguments, args, strict=False)) | kwargs
    query, key, value = named["query"], named["key"], named["value"]
    *batch, queries, size = query.shape
    flops: float = 2.0 * math.prod(batch) * queries * key.shape[-2] * (size + value.shape[-1])
    return flops * (0.5 if named.get("is_causal") else 1) * (2.5 if signature.is_backward else 1)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)  # of a DTensor: this rank's shard
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _bytes(value: Any) -> float:
    """Of the tensors on the device in a value; what is expanded is stored once."""
    total = 0
    for tensor in _tensors(value):
        if tensor.device.type != "cuda":
            continue
        count = tensor.numel()
        if count and tensor.layout is torch.strided and 0 in tensor.stride():
            count = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        total += count * tensor.element_size()
    return float(total)


def _dtype_class(given: Iterable[Any]) -> str:
    for value in given:
        for tensor in _tensors(value):
            if tensor.dtype in HALF:
                return "half"
            if tensor.is_floating_point():
                return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "single"
    return "half"


def count_iteration(iterate: Callable[[], None], multiprocessors: int) -> Work:
    """Runs one iteration and returns its work. `multiprocessors` of the GPU decide how tiles fill it."""
    trace = Trace()
    torch.cuda.synchronize()
    with _tracing(trace) as calls, OperatorWatch(trace) as watch:
        iterate()
    return Work(steps=tuple(condense(calls, watch.operations, multiprocessors)))


@contextmanager
def _tracing(trace: Trace) -> Iterator[list[Call]]:
    calls: list[Call] = []
    trace.start()
    try:
        yield calls
    finally:
        calls.extend(trace.stop())


def condense(calls: Sequence[Call], operations: Sequence[Operation | None], multiprocessors: int) -> Iterator[Step]:
    """Calls as steps: events that nobody waits for are dropped, and what is alike and adjacent is one step."""
    awaited = set(_awaited(calls))
    streams: dict[int, int] = {}
    events: dict[int, int] = {}
    spent: set[int] = set()
    dispatched, pending = 0, None
    for index, call in enumerate(calls):
        step = _step(call, operations, spent, multiprocessors)
        if call.kind == CallKind.RECORD:
            if index not in awaited:
                continue
            events[call.event] = index
            step = step._replace(event=index)
        elif call.kind in (CallKind.WAIT, CallKind.HOST_WAITS_FOR_EVENT):
            if call.event not in events:
                continue  # of the iteration before
            step = step._replace(event=events[call.event])
        stream = -1 if step.kind in (Kind.HOST_EVENT, Kind.HOST_ALL) else streams.setdefault(call.stream, len(streams))
        step = step._replace(stream=stream, operations=call.operation - dispatched)
        dispatched = call.operation
        merged = _merged(pending, step)
        if merged is None and pending is not None:
            yield pending
        pending = merged or step
    if pending is not None:
        yield pending
    yield Step(Kind.HOST_STREAM, len(operations) - 1 - dispatched, -2)  # a stream that is always idle


def _awaited(calls: Sequence[Call]) -> Iterator[int]:
    """The indices of the records that something waits for later."""
    latest: dict[int, int] = {}
    for index, call in enumerate(calls):
        if call.kind == CallKind.RECORD:
            latest[call.event] = index
        elif call.kind in (CallKind.WAIT, CallKind.HOST_WAITS_FOR_EVENT) and call.event in latest:
            yield latest[call.event]


_ORDER = {
    CallKind.RECORD: Kind.RECORD,
    CallKind.WAIT: Kind.WAIT,
    CallKind.HOST_WAITS_FOR_EVENT: Kind.HOST_EVENT,
    CallKind.HOST_WAITS_FOR_STREAM: Kind.HOST_STREAM,
    CallKind.HOST_WAITS_FOR_ALL: Kind.HOST_ALL,
}


def _step(call: Call, operations: Sequence[Operation | None], spent: set[int], multiprocessors: int) -> Step:
    """Without its stream, event and operations. An operator's bytes go to the first kernel that it launches."""
    if call.kind in _ORDER:
        return Step(_ORDER[CallKind(call.kind)], 0, 0)
    if call.kind == CallKind.COLLECTIVE:
        kind = COLLECTIVES[call.type]
        moved = call.amount * link_share(kind, call.count)
        return Step(Kind.COLLECTIVE, 0, 0, launches=int(not call.follows), bytes=moved, ranks=call.count, detail=kind)
    if call.kind == CallKind.COPY and call.type == OVER_PCIE:
        return Step(Kind.PCIE, 0, 0, launches=1, bytes=call.amount)
    operation = operations[call.operation] if call.within else None
    first = call.within and call.operation not in spent
    spent.add(call.operation if call.within else 0)
    moved = operation.bytes if operation is not None and first else 0.0
    if call.kind == CallKind.MATMUL:
        waves = math.ceil(call.count / multiprocessors) * multiprocessors / call.count if call.count else 1.0
        detail = operation.detail if operation is not None and not operation.attention_flops else "half"
        tiled = call.amount * waves
        return Step(Kind.MATMUL, 0, 0, launches=1, flops=call.amount, tile_flops=tiled, bytes=moved, detail=detail)
    if call.kind == CallKind.COPY:
        return Step(Kind.MEMORY, 0, 0, launches=1, bytes=2 * call.amount)
    if operation is None:
        return Step(Kind.UNKNOWN, 0, 0, launches=1, bytes=call.amount * BYTES_PER_THREAD)
    if operation.attention_flops:
        flops = operation.attention_flops if first else 0.0
        return Step(Kind.ATTENTION, 0, 0, launches=1, flops=flops, bytes=moved, detail=operation.detail)
    return Step(Kind.MEMORY, 0, 0, launches=1, bytes=moved)


def link_share(collective: str, ranks: int) -> float:
    """Bytes over a device's link, one way, per byte of the whole: rings (NCCL-tests, PERFORMANCE.md, bus bandwidth)."""
    return {"all_reduce": 2 * (ranks - 1) / ranks, "reduce": 1.0, "broadcast": 1.0, "send": 0.5}.get(
        collective, (ranks - 1) / ranks
    )


def _merged(before: Step | None, step: Step) -> Step | None:
    """Both as one step; None where they have to stay two."""
    if before is None or step.kind not in OCCUPIES_STREAM:
        return None
    if (before.kind, before.stream, before.ranks, before.detail) != (step.kind, step.stream, step.ranks, step.detail):
        return None
    return before._replace(
        operations=before.operations + step.operations,
        launches=before.launches + step.launches,
        flops=before.flops + step.flops,
        tile_flops=before.tile_flops + step.tile_flops,
        bytes=before.bytes + step.bytes,
    )
