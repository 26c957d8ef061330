"""How long an iteration takes, and how that is known."""

from dataclasses import dataclass

from sweep.record import CellRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Of one iteration of a cell, that is one optimizer step."""

    seconds: float
    """The headline: of measured iterations the median."""
    fastest_seconds: float
    slowest_seconds: float
    samples_per_second: float
    """Of the whole world, accumulation counted."""
    tokens_per_second: float | None
    """Padding not counted; None where a user's own batches do not say."""

    @property
    def seconds_per_sample(self) -> float:
        return 1 / self.samples_per_second


def timing_of(record: CellRecord) -> Timing | None:
    """What every chart, table and ranking takes its times from; None where the time of a cell is not known."""
    seconds, each = record.seconds_per_iteration, record.iteration_seconds
    if not seconds or not each:
        return None
    return Timing(
        seconds=seconds,
        fastest_seconds=min(each),
        slowest_seconds=max(each),
        samples_per_second=record.spec.effective_batch_size / seconds,
        tokens_per_second=record.tokens_per_second,
    )
