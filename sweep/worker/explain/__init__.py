"""One more iteration after the measured ones, with PyTorch's memory history on: what was the peak made of?

The cell's own figures are read before. It works on any GPU that PyTorch's caching allocator manages, a virtual one as
well. `explain<rank>.json` is written next to the rank's record, whatever goes wrong.
"""

import gc
import json
import pickle
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sweep.explanation import (
    REQUEST_NAME,
    Category,
    Explanation,
    ExplanationFailure,
    PhaseStart,
    Request,
    Timeline,
    explanation_name,
)
from sweep.measure.memory import CudaCounters, PhaseMemory
from sweep.record import Phase, RankRecord
from sweep.spec import CellSpec, from_json
from sweep.store import write_json
from sweep.worker.engines import Engine
from sweep.worker.explain.attribute import Attribution, Attributor, places
from sweep.worker.explain.facts import facts_of
from sweep.worker.explain.owners import Owner, bucket_sizes, find_owners
from sweep.worker.explain.recorder import Recorder
from sweep.worker.explain.replay import History, Life, play

TIMELINE_POINTS = 600
ITERATION = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class PhaseMarks(PhaseMemory):
    """Tells the recorder which phase begins."""

    def __init__(self, counters: CudaCounters, recorder: Recorder) -> None:
        super().__init__(counters)
        self._recorder = recorder

    def enter(self, phase: Phase | None) -> None:
        super().enter(phase)
        if phase is not None:
            self._recorder.enter(phase)


@dataclass
class Recording:
    """What one recorded iteration left."""

    segments: Sequence[Any]
    trace: Sequence[Any] = ()
    workspaces: set[int] = field(default_factory=set)
    allocated_peak_bytes: int = 0


def explain_if_asked(
    spec: CellSpec,
    record: RankRecord,
    engine: Engine,
    device: torch.device,
    iterate: Callable[[PhaseMemory], None],
    directory: Path,
) -> None:
    """Run `iterate` once, watched, and write what was seen. A failure is written as well, and never raised."""
    asked = directory / REQUEST_NAME
    if not asked.exists():
        return
    path = directory / explanation_name(record.rank)
    try:
        request = from_json(Request, json.loads(asked.read_text(encoding="utf-8")))
        snapshot = directory / f"snapshot{record.rank}.pickle" if request.snapshot else None
        write_json(path, _explain(spec, record, engine, device, iterate, snapshot))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        write_json(path, ExplanationFailure(message=f"{type(error).__name__}: {error}"))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _explain(
    spec: CellSpec,
    record: RankRecord,
    engine: Engine,
    device: torch.device,
    iterate: Callable[[PhaseMemory], None],
    snapshot: Path | None,
) -> Explanation:
    if not hasattr(torch._C, "_cuda_annotateMemory"):
        raise RuntimeError(f"torch {torch.__version__} cannot annotate its memory history; a newer torch can")
    gc.collect()
    torch.cuda.synchronize(device)
    owners = find_owners(engine.model, engine.optimizer, (engine, engine.optimizer))
    vocabulary = spec.model.config.get("vocab_size")
    recorder = Recorder(engine.model, owners, _any_block(owners, device), vocabulary)
    recording = record_iteration(recorder, device, iterate)
    if snapshot is not None:
        with snapshot.open("wb") as file:  # for PyTorch's own viewer, which reads nothing else
            pickle.dump(torch.cuda.memory._snapshot(device), file)
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    history = play(recording.segments, recording.trace)
    attributor = Attributor(history, owners, recorder, recording.workspaces, bucket_sizes())
    found = [(life, attributor.attribute(life)) for life in history.lives]
    peak = history.peak_time
    at_peak = [(life, one) for life, one in found if life.lives_at(peak)]
    sums: Counter[Category] = Counter()
    for life, one in at_peak:
        sums[one.category] += life.size
    # The sizes of blocks follow from the history; were one wrong, the difference would show here.
    difference = recording.allocated_peak_bytes - sum(sums.values())
    if difference:
        sums[Category.UNATTRIBUTED] += difference
    sums[Category.SLACK] = history.reserved[peak] - recording.allocated_peak_bytes
    sums[Category.CONTEXT] = context
    phase, micro_batch = attributor.phase_at(peak)
    last = max((life for life, _ in at_peak if life.start is not None), key=lambda life: life.start or 0, default=None)
    step = attributor.step_of(last) if last else None
    highest = max(record.peaks, key=lambda phase: record.peaks[phase].allocated_bytes)
    return Explanation(
        rank=record.rank,
        spec=spec,
        device_name=record.device_name,
        capacity_bytes=record.capacity_bytes,
        cell_allocated_peak_bytes=max(record.peaks[phase].allocated_bytes for phase in ITERATION),
        cell_highest_phase=highest,
        cell_highest_bytes=record.peaks[highest].allocated_bytes,
        allocated_bytes=recording.allocated_peak_bytes,
        reserved_bytes=history.reserved[peak],
        phase=phase,
        micro_batch=micro_batch,
        module=step.module if step else "",
        categories={category: sums[category] for category in Category if sums[category]},
        places=places(at_peak),
        timeline=timeline(history, found, attributor),
        facts=facts_of(engine, record, recorder),
        recorded_events=len(recording.trace),
    )


def record_iteration(recorder: Recorder, device: torch.device, iterate: Callable[[PhaseMemory], None]) -> Recording:
    """One watched iteration."""
    memory = PhaseMarks(CudaCounters(device), recorder)
    segments = _snapshot(device)["segments"]
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", clear_history=True)
    with recorder.watching():
        iterate(memory)
    torch.cuda.synchronize(device)
    memory.fold()
    recording = Recording([one for one in segments if one["device"] == device.index])
    recording.trace = _snapshot(device)["device_traces"][device.index]
    recording.allocated_peak_bytes = max(peak.allocated_bytes for peak in memory.peaks.values())
    # Only PyTorch knows where its cuBLAS workspaces are: it frees them now, which the history tells.
    bindings: Any = torch._C
    bindings._cuda_clearCublasWorkspaces()
    freed = _snapshot(device)["device_traces"][device.index][len(recording.trace) :]
    recording.workspaces = {event["addr"] for event in freed if event["action"] == "free_requested"}
    return recording


def _snapshot(device: torch.device) -> Any:
    return torch.cuda.memory._snapshot(device)


def _any_block(owners: dict[int, Owner], device: torch.device) -> int:
    """An address that stays allocated throughout the iteration, to which marks can be attached."""
    starts = {
        block["address"]
        for segment in _snapshot(device)["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and segment["device"] == device.index
    }
    kept = (Category.PARAMETERS, Category.OPTIMIZER_STATES, Category.MASTER_WEIGHTS)
    return next(where for where, owner in owners.items() if owner.category in kept and where in starts)


def timeline(history: History, found: Sequence[tuple[Life, Attribution]], attributor: Attributor) -> Timeline:
    """The highest moment of each of `TIMELINE_POINTS` stretches of events, by category."""
    events = len(history.allocated)
    width = max(1, -(-events // TIMELINE_POINTS))
    stretches = (range(start, min(start + width, events)) for start in range(0, events, width))
    moments = [max(stretch, key=history.allocated.__getitem__) for stretch in stretches]
    changes: dict[Category, Counter[int]] = {}
    for life, one in found:
        change = changes.setdefault(one.category, Counter())
        change[-1 if life.start is None else life.start] += life.size
        if life.end is not None:
            change[life.end] -= life.size
    series = {}
    for category in Category:
        if category in changes:
            series[category] = _levels(changes[category], moments)
    return Timeline(
        events=events,
        phases=tuple(
            PhaseStart(index=time, phase=phase, micro_batch=micro) for time, phase, micro in attributor.phases
        ),
        indices=tuple(moments),
        bytes=series,
    )


def _levels(changes: Counter[int], moments: Sequence[int]) -> tuple[int, ...]:
    times = iter(sorted(changes))
    level, levels, following = 0, [], next(times, None)
    for moment in moments:
        while following is not None and following <= moment:
            level += changes[following]
            following = next(times, None)
        levels.append(level)
    return tuple(levels)
