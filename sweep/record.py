"""What is known of a cell after it ran: `CellRecord`, made from the `RankRecord` that each rank writes.

Bytes and seconds throughout. Unknown is None, never 0. Records are immutable and carry a schema version.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from sweep.spec import SCHEMA_VERSION, CellSpec, SizeAxis


class Status(str, Enum):
    OK = "ok"
    THRASHING = "thrashing"
    """It ran, but the allocator had to free its cache and retry within the measured iterations."""
    OOM = "oom"
    HOST_OOM = "host_oom"
    TIMEOUT = "timeout"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    BUSY_DEVICE = "busy_device"
    INTERRUPTED = "interrupted"

    @property
    def final(self) -> bool:
        """Whether running the cell again would give the same answer, so that the record is reused."""
        return self in (Status.OK, Status.THRASHING, Status.OOM, Status.UNSUPPORTED)


class Phase(str, Enum):
    """Where in a cell's life the memory was taken, in this order."""

    LOAD = "load"
    PREPARE = "prepare"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """Highest figures within a phase, in bytes.

    On a GPU these are the counters of PyTorch's caching allocator. On the CPU device `allocated_bytes` is the
    resident memory that is not a file's and `reserved_bytes` the mapped address space, both above what there was once
    the libraries were imported, from the kernel's own high-water marks; `active_bytes` does not exist there.
    """

    allocated_bytes: int
    active_bytes: int | None
    reserved_bytes: int

    @property
    def fragmentation_bytes(self) -> int | None:
        """Reserved at its peak, less active at its peak: what the allocator held and no tensor needed."""
        return None if self.active_bytes is None else self.reserved_bytes - self.active_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    kind: str
    """The exception's class, or how the process ended."""
    message: str
    phase: Phase | None = None
    iteration: int | None = None
    rank: int | None = None
    requested_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    stderr_tail: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStart:
    phase: Phase
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlTrace:
    """A device's used memory over time, whole cells in some hundred points.

    One clock throughout: seconds since the baseline was read, which is the first point. Thinned so that every peak
    stays: of equal spans of time the highest sample is kept. On the virtual device the clock is the host's, and says
    nothing about how long training takes.
    """

    seconds: tuple[float, ...]
    used_bytes: tuple[int, ...]
    """Of the whole device, the baseline included; as many as `seconds`."""
    phases: tuple[PhaseStart, ...] = ()
    """When each phase began, in order; of several within one span the last. A phase lasts until the next begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlMemory:
    """Sampled device memory, in bytes. The baseline was read before this process touched the device."""

    baseline_bytes: int
    peak_bytes: int
    samples: int
    period_seconds: float
    info_version: int = 2
    """Of NVML's memory information: version 2 leaves out what the driver keeps for itself, version 1 does not."""
    process_bytes: int | None = None
    """Used by this process alone, at the end; None where NVML does not show it, as in containers."""
    trace: NvmlTrace | None = None
    """Only in the rank's own file, where `CellDirectory.read_traces` finds it: a cell's record stays small."""

    @property
    def other_processes_bytes(self) -> int | None:
        """What the device's peak holds of other processes; None where this process's own share is not visible."""
        return None if self.process_bytes is None else max(0, self.peak_bytes - self.process_bytes)

    @property
    def used_peak_bytes(self) -> int:
        return self.peak_bytes - self.baseline_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedMemory:
    """Peaks over a whole run that somebody else measured and published, in bytes: no phases, and not every counter."""

    allocated_bytes: int | None = None
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    nvml_used_bytes: int | None = None
    """Of the whole device; what others held of it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationParts:
    """Where an iteration's time goes: one sum in seconds per measured iteration.

    Forward, backward and optimizer are the device's time. `data` is the host's time for making and issuing a batch:
    the device waits for it only as far as it has nothing else to do.
    """

    data_seconds: tuple[float, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    optimizer_seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InEffect:
    """What the training process saw of its own configuration, in the first iteration."""

    layer_forwards: int | None
    """Times that a checkpointable layer ran in a micro-batch: 2 where it is recomputed; None where no layer is."""
    compute_dtypes: tuple[str, ...]
    """Of what the first linear layer gives."""
    parameter_dtypes: tuple[str, ...]
    gradient_dtypes: tuple[str, ...]
    optimizer_state_dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """What one rank, that is one device, measured."""

    rank: int
    device_name: str
    device_uuid: str | None = None
    capacity_bytes: int
    """What the device (on the CPU: the per-rank limit) has in all."""
    peaks: Mapping[Phase, MemoryPeak] = field(default_factory=dict)
    alloc_retries: int | None = None
    """In the measured iterations: times the allocator emptied its cache because the device had nothing left."""
    warmup_alloc_retries: int | None = None
    """The same before the measured iterations, where it costs nothing afterwards."""
    ooms: int | None = None
    segments: int | None = None
    """That the allocator held at the end; one is one reservation, or one expandable segment."""
    reserved_by_iteration_bytes: tuple[int, ...] | None = None
    """At the end of the warm-up and of every measured iteration; None on the CPU device."""
    nvml: NvmlMemory | None = None
    seconds_per_iteration: tuple[float, ...] | None = None
    """One duration per measured iteration; None where time is not measured (virtual device)."""
    parts: IterationParts | None = None
    measured_tokens: int | None = None
    """That this rank was given in the measured iterations, without padding; None where nobody can say."""
    iterations: int | None = None
    """That were begun, warm-up and skipped steps included."""
    in_effect: InEffect | None = None
    loss: float | None = None
    """None on the virtual device, where nothing is computed."""
    loss_by_iteration: tuple[float, ...] | None = None
    """From the first iteration on, each the mean over its micro-batches, of this rank's samples. On the CPU device
    alone: to read a loss from a GPU is to wait for it."""
    optimizer_steps: int = 0
    parameters: int | None = None
    allocator_settings: Mapping[str, Any] | None = None
    """The allocator's configuration as read back from it; None on the CPU device."""
    failure: Failure | None = None
    work: Mapping[str, float] | None = None
    """What an iteration asks of the virtual device: sums such as `matmul.half.flops`; empty where counting failed."""
    oom: bool = False
    host_oom: bool = False
    """The host, and not the device, had no room: pinned memory for instance."""
    reported: ReportedMemory | None = None
    """Imported records only, in place of `peaks` and `nvml`."""

    @property
    def reserved_growth_bytes(self) -> int | None:
        """By how much reserved memory rose within the measured iterations: more than 0 is still growing."""
        reserved = self.reserved_by_iteration_bytes
        return None if not reserved else reserved[-1] - reserved[0]

    def without_trace(self) -> "RankRecord":
        return self if self.nvml is None else replace(self, nvml=replace(self.nvml, trace=None))

    @property
    def allocated_peak_bytes(self) -> int | None:
        if self.reported:
            return self.reported.allocated_bytes
        return max((peak.allocated_bytes for peak in self.peaks.values()), default=None)

    @property
    def active_peak_bytes(self) -> int | None:
        if self.reported:
            return self.reported.active_bytes
        return max((p.active_bytes for p in self.peaks.values() if p.active_bytes is not None), default=None)

    @property
    def reserved_peak_bytes(self) -> int | None:
        if self.reported:
            return self.reported.reserved_bytes
        return max((peak.reserved_bytes for peak in self.peaks.values()), default=None)

    @property
    def nvml_used_peak_bytes(self) -> int | None:
        """Sampled; less the baseline where that is known."""
        if self.reported:
            return self.reported.nvml_used_bytes
        return self.nvml.used_peak_bytes if self.nvml else None


class TimingKind(str, Enum):
    """Where a cell's seconds come from."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """Seconds that were computed and not measured: see `sweep.estimate`."""

    seconds_per_iteration: float
    uncertainty: float
    """Relative: 0.25 says that the truth is expected within 25% to either side."""
    model: str
    """The model's name and version, and what its factors were fitted to, if they were."""
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    """By the kind of work: it overlaps, so that the sum may exceed the iteration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRecord:
    cell_id: str
    series_id: str
    status: Status
    reason: str | None = None
    """One sentence, unless the status says it all."""
    spec: CellSpec
    environment: Mapping[str, Any]
    """Versions, GPU, driver, git commit, host: see `sweep.environment`."""
    command: str
    """Repeats the cell."""
    ranks: tuple[RankRecord, ...] = ()
    """One per rank that reported. The virtual device plays rank 0 of the world alone."""
    failure: Failure | None = None
    started_at: str
    duration_seconds: float
    """Wall time of the whole cell, process start included: what the cell cost, not what training costs."""
    schema_version: int = SCHEMA_VERSION
    searched: SizeAxis = SizeAxis.BATCH_SIZE
    """What the sweep that measured it was looking for the largest of."""
    imported_from: str | None = None
    """Who published these figures; None for what was run here."""
    estimate: TimeEstimate | None = None
    """Beside the measurement, never in its place."""

    @property
    def timing_kind(self) -> TimingKind:
        if self.time_is_measured:
            return TimingKind.MEASURED
        return TimingKind.NONE if self.estimate is None else TimingKind.ESTIMATED

    @property
    def time_is_measured(self) -> bool:
        return self.seconds_per_iteration is not None

    @property
    def iteration_seconds(self) -> tuple[float, ...] | None:
        """Per measured iteration, the slowest rank's duration: the others wait for it."""
        times = [rank.seconds_per_iteration for rank in self.ranks]
        measured = [t for t in times if t]
        return tuple(max(each) for each in zip(*measured, strict=False)) if measured else None

    @property
    def seconds_per_iteration(self) -> float | None:
        """Median over the measured iterations; one iteration is one optimizer step."""
        times = self.iteration_seconds
        return statistics.median(times) if times else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole world, accumulation counted, padding not. None also where nobody can count a user's batches."""
        seconds, all_seconds = self.seconds_per_iteration, self.iteration_seconds
        if not seconds or not all_seconds:
            return None
        if self.spec.workload.full_length:
            return self.spec.tokens_per_iteration / seconds
        tokens = [rank.measured_tokens for rank in self.ranks[: self.spec.processes]]
        known = [count for count in tokens if count is not None]
        return sum(known) / sum(all_seconds) if len(known) == len(tokens) else None

    @property
    def samples_per_second(self) -> float | None:
        seconds = self.seconds_per_iteration
        return self.spec.effective_batch_size / seconds if seconds else None

    @property
    def largest_rank(self) -> RankRecord | None:
        """The headline: the rank that reserved most. Devices are never summed or averaged."""
        measured = [rank for rank in self.ranks if rank.reserved_peak_bytes is not None]
        return max(measured, key=lambda rank: (rank.reserved_peak_bytes or 0, -rank.rank), default=None)
