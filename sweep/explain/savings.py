"""Whether a finding's advice saves what it says: the changed cell is run on the virtual device, and so is the first."""

from dataclasses import dataclass

from sweep import virtual
from sweep.explain.cells import RAN, Explained
from sweep.explain.findings import Counter, Finding, changed
from sweep.launch import run_cell
from sweep.prior import virtual_twin
from sweep.record import CellRecord, Status
from sweep.spec import CellSpec, DeviceKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Peaks of the whole iteration, before and after the change, on the virtual device."""

    before_bytes: int | None
    """None: it runs out of memory there."""
    after_bytes: int | None
    after: Status
    reason: str | None

    @property
    def saved_bytes(self) -> int | None:
        return None if self.before_bytes is None or self.after_bytes is None else self.before_bytes - self.after_bytes


def verify(finding: Finding, explained: Explained) -> Verified | None:
    """None where the sweep has no cell for the advice, or no virtual device is like the real one."""
    spec = explained.explanation.spec
    if spec.device.kind is not DeviceKind.VIRTUAL:
        twin = None if virtual.check() else virtual_twin(spec, explained.explanation.device_name)
        if twin is None:
            return None
        spec = twin
    after = changed(spec, finding.changes) if finding.changes else None
    if after is None:
        return None

    def run(one: CellSpec) -> CellRecord:
        return run_cell(one, explained.subject.scratch, [])

    before = explained.record if spec == explained.record.spec else run(spec)
    result = run(after)
    return Verified(
        before_bytes=_peak(before, finding.counter),
        after_bytes=_peak(result, finding.counter),
        after=result.status,
        reason=result.reason,
    )


def _peak(record: CellRecord, counter: Counter) -> int | None:
    rank = record.largest_rank
    if record.status not in RAN or rank is None:
        return None
    return rank.allocated_peak_bytes if counter is Counter.ALLOCATED else rank.reserved_peak_bytes
