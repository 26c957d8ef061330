"""One rank of one cell, from top to bottom: load, prepare, warm up, measure, report.

Whatever goes wrong becomes part of the rank's record: an out-of-memory is a result, not an exception.
"""

import math
import os
import re
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from sweep.measure.memory import CpuCounters, CudaCounters, PhaseMemory
from sweep.measure.nvml import NvmlSampler
from sweep.measure.timing import CpuTimer, CudaTimer, IterationTimer, NoTimer
from sweep.record import Failure, Phase, RankRecord
from sweep.spec import CellSpec, DeviceKind, EngineName, Precision
from sweep.worker.engines import Engine, make_engine
from sweep.worker.model import RandomBatches, build_model, import_architecture

MAX_SKIPPED_STEPS = 20
"""Dynamic fp16 loss scaling skips steps until the scale fits; more than this means that it never will."""


@dataclass
class Progress:
    """How far a rank got: what a failure is told with."""

    memory: PhaseMemory
    iteration: int | None = None
    alloc_retries: int | None = None
    warmup_alloc_retries: int | None = None
    seconds_per_iteration: tuple[float, ...] | None = None
    loss: torch.Tensor | None = None
    """Of the last iteration's last micro-batch; still on the device, and only one of them at a time."""
    engine: Engine | None = field(default=None, repr=False)


def run_rank(spec: CellSpec, rank: int, local_rank: int) -> RankRecord:
    on_cpu = spec.device.kind is DeviceKind.CPU
    import_architecture(spec)
    with NvmlSampler(local_rank, enabled=not on_cpu) as nvml:  # before CUDA starts, so that its baseline is clean
        device = torch.device("cpu") if on_cpu else torch.device("cuda", local_rank)
        counters: CpuCounters | CudaCounters
        if on_cpu:
            counters = CpuCounters()
            capacity = spec.device.memory_limit_bytes
            assert capacity is not None
            counters.limit_memory(capacity)
        else:
            if not torch.cuda.is_available():
                raise RuntimeError("torch finds no CUDA device")
            torch.cuda.set_device(device)
            counters = CudaCounters(device)
            capacity = torch.cuda.get_device_properties(device).total_memory
        if spec.precision is Precision.TF32:
            torch.set_float32_matmul_precision("high")
        torch.manual_seed(spec.seed)
        progress = Progress(PhaseMemory(counters))
        failure, oom = None, False
        try:
            progress.memory.enter(Phase.LOAD)
            join_world(spec, device)
            train(spec, rank, device, progress)
        except Exception as error:
            oom = is_out_of_memory(error)
            if isinstance(counters, CpuCounters):
                counters.lift_limit()  # what follows must not run into it again
            traceback.print_exc(file=sys.stderr)
            failure = describe_failure(error, rank, progress, None if on_cpu else device)
        progress.memory.fold()
        nvml.sample()
    return RankRecord(
        rank=rank,
        device_name="CPU" if on_cpu else torch.cuda.get_device_name(device),
        device_uuid=nvml.uuid,
        capacity_bytes=capacity,
        peaks=progress.memory.peaks,
        alloc_retries=progress.alloc_retries,
        warmup_alloc_retries=progress.warmup_alloc_retries,
        ooms=counters.ooms() if isinstance(counters, CudaCounters) else None,
        nvml=nvml.result,
        seconds_per_iteration=progress.seconds_per_iteration,
        loss=finite(progress.loss),
        optimizer_steps=progress.engine.optimizer_steps if progress.engine and progress.iteration is not None else 0,
        parameters=progress.engine.parameter_count if progress.engine and progress.iteration is not None else None,
        allocator_settings=None if on_cpu else allocator_settings(),
        failure=failure,
        oom=oom,
    )


def join_world(spec: CellSpec, device: torch.device) -> None:
    """Form the process group; a single rank needs none, except that DeepSpeed wants one in any case."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    if spec.world_size > 1:
        dist.init_process_group(backend)
    elif spec.engine.name is EngineName.DEEPSPEED:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def train(spec: CellSpec, rank: int, device: torch.device, progress: Progress) -> None:
    engine = make_engine(spec, device)
    engine.load(lambda dtype: build_model(spec, dtype))
    progress.memory.enter(Phase.PREPARE)
    engine.prepare()
    batches = RandomBatches(spec, rank, device)
    progress.engine, progress.iteration = engine, 0

    while progress.iteration < spec.warmup_iterations or engine.optimizer_steps == 0:
        if progress.iteration >= spec.warmup_iterations + MAX_SKIPPED_STEPS:
            raise RuntimeError(f"the optimizer made no step in {progress.iteration} iterations: every one was skipped")
        iterate(spec, engine, batches, progress)
    steps_before = engine.optimizer_steps
    progress.warmup_alloc_retries = retries(progress)
    timer = make_timer(spec)
    timer.start()
    for _ in range(spec.measured_iterations):
        iterate(spec, engine, batches, progress)
        timer.lap()
    progress.seconds_per_iteration = timer.stop()
    if progress.warmup_alloc_retries is not None:
        progress.alloc_retries = (retries(progress) or 0) - progress.warmup_alloc_retries
    assert engine.optimizer_steps > steps_before, "no optimizer step happened in the measured iterations"


def iterate(spec: CellSpec, engine: Engine, batches: RandomBatches, progress: Progress) -> None:
    """One optimizer step."""
    assert progress.iteration is not None
    progress.loss = None
    for _ in range(spec.accumulation):
        progress.memory.enter(Phase.FORWARD)
        batch = batches.next()
        assert batch["input_ids"].shape == (spec.batch_size, spec.seq_len)
        with engine.micro_batch():
            loss = engine.forward(batch)
            progress.memory.enter(Phase.BACKWARD)
            engine.backward(loss)
            progress.memory.enter(Phase.OPTIMIZER)
            engine.step()
    progress.iteration += 1
    progress.loss = loss.detach()


def make_timer(spec: CellSpec) -> IterationTimer:
    if spec.device.kind is DeviceKind.VIRTUAL:
        return NoTimer()
    return CpuTimer() if spec.device.kind is DeviceKind.CPU else CudaTimer()


def retries(progress: Progress) -> int | None:
    counters = progress.memory.counters
    return counters.alloc_retries() if isinstance(counters, CudaCounters) else None


def finite(loss: torch.Tensor | None) -> float | None:
    value = math.nan if loss is None else float(loss)
    return value if math.isfinite(value) else None


def allocator_settings() -> dict[str, object]:
    """What is in force, read back from the allocator rather than from the environment."""
    return dict(torch.cuda.memory._snapshot()["allocator_settings"])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device (on the CPU: the rank's memory limit) had no room for what was asked."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return "DefaultCPUAllocator: can't allocate memory" in text or "CUDA error: out of memory" in text


def describe_failure(error: Exception, rank: int, progress: Progress, device: torch.device | None) -> Failure:
    free = allocated = reserved = None
    if device is not None:
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        with suppress(RuntimeError):  # the context is beyond use after some errors
            free = torch.cuda.mem_get_info(device)[0]
    return Failure(
        kind=type(error).__name__,
        message=str(error).split("\n\n")[0][:2000],
        phase=progress.memory.phase,
        iteration=progress.iteration,
        rank=rank,
        requested_bytes=_requested_bytes(str(error)),
        free_bytes=free,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
    )


def _requested_bytes(message: str) -> int | None:
    """The size in PyTorch's own messages: `Tried to allocate 1.96 GiB` (GPU), `you tried to allocate N bytes` (CPU)."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    if not found:
        return None
    unit = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[found.group(2)]
    return round(float(found.group(1)) * unit)
