"""From counted work to seconds: a roofline for each step, and a replay of the streams that overlap.

The host issues steps one after the other and pays for each operator. A stream takes its steps in order, each when the
host has issued it and the events it waits for have happened. So communication hides behind computation as far as the
engine lets it, and a host that is too slow shows. Kernels on several streams share one GPU: what a side stream computes
is taken from the main one, and so is a part of the time in which a collective runs beside it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sweep.estimate.factors import Calibration, Factors
from sweep.estimate.work import OCCUPIES_STREAM, Kind, Step, Work
from sweep.record import TimeEstimate
from sweep.virtual import GpuProfile

TERA, GIGA = 1e12, 1e9
GPUS_A_MACHINE = 8
ITERATIONS = 2
"""Replayed: the second one begins while the device may still be busy with the first, as in a real loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a GPU does in a second, as the factors have it."""

    matmul_flops: Mapping[str, float]
    attention_flops: Mapping[str, float]
    memory_bytes: float
    link_bytes: float
    factors: Factors


def rates_of(gpu: GpuProfile, factors: Factors) -> Rates | None:
    """None where the profile lacks a rate that nothing can stand for."""
    half, single, memory = gpu.bf16_dense_tflops, gpu.fp32_tflops, gpu.memory_bandwidth_gb_per_second
    if half is None or single is None or memory is None:
        return None
    clock = factors.geforce_clock if "GeForce" in gpu.name else 1.0
    half, single = half * clock, single * clock
    tf32 = (
        clock * gpu.tf32_dense_tflops * factors.matmul_tf32 if gpu.tf32_dense_tflops else single * factors.matmul_single
    )
    attention = {"flash": factors.attention_flash, "cudnn": factors.attention_flash}
    # Attention in fp32 has no kernel of its own rate: it is taken to be as fast as matrix products.
    wide = {"tf32": tf32 * TERA, "single": single * factors.matmul_single * TERA}
    link = gpu.nvlink_gb_per_second
    return Rates(
        matmul_flops={"half": half * factors.matmul_half * TERA, **wide},
        attention_flops={
            how: half * attention.get(how, factors.attention_efficient) * TERA
            for how in ("flash", "cudnn", "efficient", "other")
        }
        | wide,
        memory_bytes=memory * factors.memory * GIGA,
        link_bytes=link / 2 * factors.link * GIGA if link else factors.slow_link_bytes_per_second,
        factors=factors,
    )


def step_seconds(step: Step, rates: Rates) -> float:
    """How long a stream is busy with a step: the larger of arithmetic and traffic, and what each launch costs."""
    traffic = step.bytes / rates.memory_bytes
    launches = step.launches * rates.factors.kernel_seconds
    if step.kind is Kind.MATMUL:
        return launches + max(step.tile_flops / rates.matmul_flops[step.detail], traffic)
    if step.kind is Kind.ATTENTION:
        return launches + max(step.flops / rates.attention_flops[step.detail], traffic)
    if step.kind is Kind.PCIE:
        return launches + step.bytes / rates.factors.pcie_bytes_per_second
    if step.kind is Kind.COLLECTIVE:
        link = rates.link_bytes if step.ranks <= GPUS_A_MACHINE else rates.factors.network_bytes_per_second
        return step.launches * rates.factors.collective_seconds + step.bytes / link
    return launches + traffic


class Replay:
    """The clocks of the host and of the streams, in seconds."""

    def __init__(self, rates: Rates, main_stream: int) -> None:
        self._rates = rates
        self._main = main_stream
        self._host = 0.0
        self._free: dict[int, float] = defaultdict(float)
        """When a stream will have done all it was given."""
        self._happened: dict[int, float] = {}
        self.busy: dict[Kind, float] = defaultdict(float)

    def run(self, work: Work) -> float:
        """Issue the steps of an iteration. Gives the time at which host and streams are done with everything so far."""
        factors = self._rates.factors
        for step in work.steps:
            self._host += step.operations * factors.operation_seconds
            if step.kind in OCCUPIES_STREAM:
                is_collective = step.kind is Kind.COLLECTIVE
                call = factors.collective_call_seconds if is_collective else factors.launch_seconds
                self._host += step.launches * call
                seconds = step_seconds(step, self._rates)
                self.busy[step.kind] += seconds
                self._free[step.stream] = max(self._free[step.stream], self._host) + seconds
                if step.stream != self._main and step.kind is not Kind.PCIE:
                    share = factors.collective_contention if is_collective else 1.0
                    self._free[self._main] += share * seconds
            else:
                self._order(step)
        return max(self._host, *self._free.values()) if self._free else self._host

    def _order(self, step: Step) -> None:
        if step.kind is Kind.RECORD:
            self._happened[step.event] = max(self._free[step.stream], self._host)
        elif step.kind is Kind.WAIT:
            self._free[step.stream] = max(self._free[step.stream], self._happened[step.event])
        elif step.kind is Kind.HOST_EVENT:
            self._host = max(self._host, self._happened[step.event])
        elif step.kind is Kind.HOST_STREAM:
            self._host = max(self._host, self._free[step.stream])
        elif self._free:
            self._host = max(self._host, *self._free.values())


def main_stream(work: Work) -> int:
    """The one with most of the arithmetic."""
    flops: dict[int, float] = defaultdict(float)
    for step in work.steps:
        flops[step.stream] += step.flops
    return max(flops, key=lambda stream: flops[stream], default=0)


def seconds_per_iteration(work: Work, rates: Rates) -> tuple[float, Mapping[Kind, float]]:
    """Of an iteration in a running loop; and how long the device is busy with what, which overlaps."""
    replay = Replay(rates, main_stream(work))
    ends = [replay.run(work) for _ in range(ITERATIONS)]
    return ends[-1] - ends[-2], {kind: busy / ITERATIONS for kind, busy in replay.busy.items()}


def estimate(work: Work, gpu: GpuProfile, calibration: Calibration) -> TimeEstimate | None:
    """None where too little is known of the GPU."""
    rates = rates_of(gpu, calibration.factors)
    if rates is None:
        return None
    seconds, busy = seconds_per_iteration(work, rates)
    return TimeEstimate(
        seconds_per_iteration=seconds,
        uncertainty=calibration.uncertainty,
        model=calibration.model,
        busy_seconds={kind.value: busy[kind] for kind in Kind if kind in busy},
    )
