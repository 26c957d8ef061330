"""One rank of one cell, from top to bottom: load, prepare, warm up, measure, report.

Whatever goes wrong becomes part of the rank's record: an out-of-memory is a result, not an exception.
"""

import math
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from sweep.launch.progress import ProgressFile
from sweep.launch.stacks import answer_when_asked
from sweep.measure.memory import CpuCounters, CudaCounters, PhaseMemory
from sweep.measure.nvml import NvmlSampler
from sweep.measure.timing import CpuTimer, CudaTimer, IterationTimer, NoTimer, Part, Times
from sweep.record import Failure, InEffect, Phase, RankRecord
from sweep.spec import CellSpec, DeviceKind, EngineName, Precision
from sweep.worker.counting import count_work, is_countable
from sweep.worker.engines import Engine, make_engine
from sweep.worker.explain import explain_if_asked
from sweep.worker.failure import Cause, RefusedRequest, cause_of, describe_failure, free_memory
from sweep.worker.in_effect import Witness, check_steps
from sweep.worker.workload import Batches, import_workload, make_workload

MAX_SKIPPED_STEPS = 20
"""Dynamic fp16 loss scaling skips steps until the scale fits; more than this means that it never will."""
MAX_WINDOWS = 3
"""A measured window in which fp16 scaling skipped a step is measured again, so often at most in all."""
PARTS = {Phase.FORWARD: Part.FORWARD, Phase.BACKWARD: Part.BACKWARD, Phase.OPTIMIZER: Part.OPTIMIZER}


@dataclass
class Progress:
    """How far a rank got: what a failure is told with."""

    memory: PhaseMemory
    file: ProgressFile | None = None
    nvml: NvmlSampler | None = None
    timer: IterationTimer = field(default_factory=NoTimer)
    iteration: int | None = None
    alloc_retries: int | None = None
    warmup_alloc_retries: int | None = None
    reserved: list[int] = field(default_factory=list)
    """In bytes, at the end of the warm-up and of every measured iteration."""
    times: Times | None = None
    tokens: int | None = None
    in_effect: InEffect | None = None
    loss: torch.Tensor | None = None
    """Of the last iteration's last micro-batch; still on the device, and only one of them at a time."""
    losses: list[float] = field(default_factory=list)
    """CPU device only: of every iteration, the mean over its micro-batches."""
    engine: Engine | None = field(default=None, repr=False)
    again: Callable[[PhaseMemory], None] | None = field(default=None, repr=False)
    """One more iteration, with other counters."""

    def enter(self, phase: Phase) -> None:
        self.memory.enter(phase)
        if phase in PARTS:
            self.timer.mark(PARTS[phase])
        if self.nvml is not None:
            self.nvml.enter(phase)
        if self.file is not None:
            self.file.beat(phase, self.iteration)


def run_rank(spec: CellSpec, rank: int, local_rank: int, directory: Path) -> tuple[RankRecord, ...]:
    """The record of this process's device; where it has several, one of each, in their order."""
    on_cpu = spec.device.kind is DeviceKind.CPU
    answer_when_asked(directory, rank)
    file = ProgressFile(directory, rank)
    impossible: Exception | None = None
    try:
        import_workload(spec)
    except Exception as error:  # a model that cannot be: told once there is a record to tell it in
        impossible = error
    with ExitStack() as samplers:  # before CUDA starts, so that their baselines are clean
        nvml = samplers.enter_context(NvmlSampler(enabled=not on_cpu))
        further_nvml = [samplers.enter_context(NvmlSampler()) for _ in further_devices(spec)]
        device = torch.device("cpu") if on_cpu else torch.device("cuda", local_rank)
        counters: CpuCounters | CudaCounters
        uuid, refused = None, RefusedRequest()
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
            refused.watch()
            properties = torch.cuda.get_device_properties(device)
            capacity = properties.total_memory
            uuid = nvml.bind(str(properties.uuid))
            for number, sampler in zip(further_devices(spec), further_nvml, strict=True):
                sampler.bind(str(torch.cuda.get_device_properties(number).uuid))
        if spec.precision is Precision.TF32:
            torch.set_float32_matmul_precision("high")
        torch.manual_seed(spec.seed)
        progress = Progress(PhaseMemory(counters, further_memory(spec)), file, nvml)
        failure: Failure | None = None
        cause: Cause | None = None
        try:
            progress.enter(Phase.LOAD)
            if impossible is not None:
                raise impossible
            join_world(spec, device)
            train(spec, rank, device, progress)
        except Exception as error:
            free = None if on_cpu else free_memory(device, capacity, nvml.free_bytes)
            cause = cause_of(error, free)
            if isinstance(counters, CpuCounters):
                counters.lift_limit()  # what follows must not run into it again
            traceback.print_exc(file=sys.stderr)
            failure = describe_failure(
                error, rank, progress.memory, progress.iteration, None if on_cpu else device, free, refused
            )
        progress.memory.fold()
        for sampler in (nvml, *further_nvml):
            sampler.finish()
    trained = progress.engine is not None and progress.iteration is not None
    record = RankRecord(
        rank=rank,
        device_name="CPU" if on_cpu else torch.cuda.get_device_name(device),
        device_uuid=uuid,
        capacity_bytes=capacity,
        peaks=progress.memory.peaks,
        alloc_retries=progress.alloc_retries,
        warmup_alloc_retries=progress.warmup_alloc_retries,
        ooms=counters.ooms() if isinstance(counters, CudaCounters) else None,
        segments=counters.segments() if isinstance(counters, CudaCounters) else None,
        reserved_by_iteration_bytes=tuple(progress.reserved) or None,
        nvml=nvml.result,
        seconds_per_iteration=progress.times.seconds_per_iteration if progress.times else None,
        parts=progress.times.parts if progress.times else None,
        measured_tokens=progress.tokens,
        iterations=progress.iteration,
        in_effect=progress.in_effect,
        loss=None if failure or spec.device.kind is DeviceKind.VIRTUAL else finite(progress.loss),
        loss_by_iteration=tuple(progress.losses) or None,
        optimizer_steps=progress.engine.optimizer_steps if progress.engine and trained else 0,
        parameters=progress.engine.parameter_count if progress.engine and trained else None,
        allocator_settings=None if on_cpu else allocator_settings(),
        failure=failure,
        oom=cause is Cause.DEVICE_MEMORY,
        host_oom=cause is Cause.HOST_MEMORY,
    )
    others = tuple(further_records(progress.memory.others, further_nvml))
    if progress.engine is not None and progress.again is not None and failure is None:
        explain_if_asked(spec, record, progress.engine, device, progress.again, directory)
        if is_countable(spec):
            record = replace(record, work=count_work(progress.again, device, directory))
    return (record, *others)


def further_devices(spec: CellSpec) -> range:
    """Of a process that has several devices, the numbers of all but the first."""
    return range(1, 1 if spec.processes == spec.world_size else spec.world_size)


def further_memory(spec: CellSpec) -> list[PhaseMemory]:
    return [PhaseMemory(CudaCounters(torch.device("cuda", number))) for number in further_devices(spec)]


def further_records(others: Iterable[PhaseMemory], nvml: Iterable[NvmlSampler]) -> Iterator[RankRecord]:
    """What belongs to the process rather than to a device is in the first device's record alone."""
    for memory, sampler in zip(others, nvml, strict=True):
        assert isinstance(memory.counters, CudaCounters)
        device = memory.counters.device
        properties = torch.cuda.get_device_properties(device)
        yield RankRecord(
            rank=device.index,
            device_name=properties.name,
            device_uuid=f"GPU-{properties.uuid}",
            capacity_bytes=properties.total_memory,
            peaks=memory.peaks,
            ooms=memory.counters.ooms(),
            segments=memory.counters.segments(),
            nvml=sampler.result,
            allocator_settings=allocator_settings(),
        )


def join_world(spec: CellSpec, device: torch.device) -> None:
    """Form the process group; a single rank needs none, except that DeepSpeed and FSDP2 want one in any case."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    if spec.engine.cpu_offload:  # gradients are clipped on the host
        backend = "cpu:gloo,cuda:nccl"
    if spec.processes > 1:
        dist.init_process_group(backend)
    elif spec.engine.name in (EngineName.DEEPSPEED, EngineName.FSDP2):
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def train(spec: CellSpec, rank: int, device: torch.device, progress: Progress) -> None:
    workload = make_workload(spec, rank, device)
    engine = make_engine(spec, device)
    engine.load(workload.build)
    engine.model = workload.adapt(engine.model)
    progress.enter(Phase.PREPARE)
    engine.prepare(workload.given)
    batches = workload.batches()
    progress.engine, progress.iteration = engine, 0
    warm_up(spec, engine, batches, progress)
    progress.warmup_alloc_retries = retries(progress)
    for _ in range(MAX_WINDOWS):
        if measure(spec, engine, batches, progress) == spec.measured_iterations:
            break
    else:
        raise RuntimeError(f"optimizer steps were skipped in each of {MAX_WINDOWS} measured windows")
    check_steps(spec, progress.iteration, engine.optimizer_steps)
    progress.again = partial(again, spec, engine, batches, progress)
    if spec.device.kind is not DeviceKind.VIRTUAL and finite(progress.loss) is None:
        raise RuntimeError(f"the loss is not finite after {progress.iteration} iterations")


def warm_up(spec: CellSpec, engine: Engine, batches: Batches, progress: Progress) -> None:
    """Until the optimizer's states exist and the last step was not skipped: fp16 scaling has settled then."""
    witness = Witness(spec, engine.model)
    stepped = False
    assert progress.iteration is not None
    while progress.iteration < spec.warmup_iterations or not stepped:
        if progress.iteration >= spec.warmup_iterations + MAX_SKIPPED_STEPS:
            raise RuntimeError(f"the optimizer made no step in {progress.iteration} iterations: every one was skipped")
        steps = engine.optimizer_steps
        with witness.watching() if progress.iteration == 0 else nullcontext():
            iterate(spec, engine, batches, progress)
        stepped = engine.optimizer_steps > steps
        check_steps(spec, progress.iteration, engine.optimizer_steps)
    progress.in_effect = witness.testimony(engine.optimizer)


def measure(spec: CellSpec, engine: Engine, batches: Batches, progress: Progress) -> int:
    """One window. Gives the optimizer steps that really happened in it."""
    steps_before, tokens_before = engine.optimizer_steps, batches.tokens
    progress.reserved = reserved(progress)
    progress.timer = make_timer(spec)
    progress.timer.start()
    for _ in range(spec.measured_iterations):
        iterate(spec, engine, batches, progress)
        progress.timer.lap()
        progress.reserved += reserved(progress)
    progress.times = progress.timer.stop()
    if batches.tokens is not None and tokens_before is not None:
        progress.tokens = batches.tokens - tokens_before
    progress.timer = NoTimer()
    if progress.warmup_alloc_retries is not None:
        progress.alloc_retries = (retries(progress) or 0) - progress.warmup_alloc_retries
    return engine.optimizer_steps - steps_before


def iterate(spec: CellSpec, engine: Engine, batches: Batches, progress: Progress) -> None:
    """One optimizer step."""
    assert progress.iteration is not None
    progress.loss = None
    losses = []
    for _ in range(spec.accumulation):
        progress.timer.mark(Part.DATA)
        progress.memory.enter(Phase.FORWARD)
        batch = batches.next()
        if spec.workload.full_length:
            shape = tuple(batch["input_ids"].shape)
            assert shape == (spec.batch_size, spec.seq_len), f"a batch of shape {shape}"
        progress.enter(Phase.FORWARD)
        with engine.micro_batch():
            loss = engine.forward(batch)
            progress.enter(Phase.BACKWARD)
            engine.backward(loss)
            progress.enter(Phase.OPTIMIZER)
            engine.step()
        if loss.device.type == "cpu":
            losses.append(float(loss.detach()))
    progress.iteration += 1
    if losses:
        progress.losses.append(statistics.fmean(losses))
    progress.loss = loss.detach()


def again(spec: CellSpec, engine: Engine, batches: Batches, progress: Progress, memory: PhaseMemory) -> None:
    """One more iteration once everything is measured, with other counters."""
    progress.memory, progress.nvml = memory, None
    iterate(spec, engine, batches, progress)


def make_timer(spec: CellSpec) -> IterationTimer:
    if spec.device.kind is DeviceKind.VIRTUAL:
        return NoTimer()
    return CpuTimer() if spec.device.kind is DeviceKind.CPU else CudaTimer()


def retries(progress: Progress) -> int | None:
    """On all devices of this process."""
    counters = [memory.counters for memory in (progress.memory, *progress.memory.others)]
    cuda = [each for each in counters if isinstance(each, CudaCounters)]
    return sum(each.alloc_retries() for each in cuda) if cuda else None


def reserved(progress: Progress) -> list[int]:
    counters = progress.memory.counters
    return [counters.reserved()] if isinstance(counters, CudaCounters) else []


def finite(loss: torch.Tensor | None) -> float | None:
    value = math.nan if loss is None else float(loss)
    return value if math.isfinite(value) else None


def allocator_settings() -> dict[str, object]:
    """What is in force, read back from the allocator rather than from the environment."""
    return dict(torch.cuda.memory._snapshot()["allocator_settings"])
