"""How long an iteration takes, and how that is known."""

from dataclasses import dataclass

from sweep.record import CellRecord, TimingKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Of one iteration of a cell, that is one optimizer step."""

    kind: TimingKind
    seconds: float
    """The headline: of measured iterations the median."""
    fastest_seconds: float
    slowest_seconds: float
    """Of the measured iterations; of an estimate, its uncertainty to either side."""
    samples_per_second: float
    """Of the whole world, accumulation counted."""
    tokens_per_second: float | None
    """Padding not counted; None where a user's own batches do not say."""

    @property
    def is_estimated(self) -> bool:
        return self.kind is TimingKind.ESTIMATED

    @property
    def mark(self) -> str:
        """Stands behind every figure in words: ` est.` where it is an estimate."""
        return " est." if self.is_estimated else ""

    @property
    def seconds_per_sample(self) -> float:
        return 1 / self.samples_per_second


def timing_of(record: CellRecord) -> Timing | None:
    """What every chart, table and ranking takes its times from; None where the time of a cell is not known.

    A measured time is preferred to an estimated one. Whoever shows it says which it is.
    """
    seconds, each, estimate = record.seconds_per_iteration, record.iteration_seconds, record.estimate
    if seconds and each:
        fastest, slowest, tokens = min(each), max(each), record.tokens_per_second
    elif estimate is not None:
        seconds = estimate.seconds_per_iteration
        fastest, slowest = (seconds * (1 + sign * estimate.uncertainty) for sign in (-1, 1))
        tokens = record.spec.tokens_per_iteration / seconds  # only full-length batches are estimated
    else:
        return None
    return Timing(
        kind=record.timing_kind,
        seconds=seconds,
        fastest_seconds=fastest,
        slowest_seconds=slowest,
        samples_per_second=record.spec.effective_batch_size / seconds,
        tokens_per_second=tokens,
    )
