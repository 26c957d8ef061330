"""From records to answers: which batch size fits in which configuration, and what happened at the next one.

Pure functions over `CellRecord`s. An answer names only sizes that ran: a size that nobody tried is said to be
untried, never assumed to fit or to fail. Bytes and seconds inside, GiB in what is shown.
"""

from sweep.analysis.comparisons import (
    CPU_SENTENCE,
    IMPORTED_SENTENCE,
    NOISE,
    VIRTUAL_SENTENCE,
    AxisError,
    caveats,
    chosen,
    groups,
    headline,
    ordered,
    pairs,
    settings,
    varying_axes,
    verdicts,
)
from sweep.analysis.details import details, noteworthy
from sweep.analysis.rows import Row, limits, row_of, table
from sweep.analysis.series import Series, series_of
from sweep.analysis.timing import Timing, timing_of
from sweep.analysis.words import (
    GIB,
    MIB,
    axis_cell,
    axis_label,
    axis_name,
    failure_of,
    fragmented,
    outcome,
    size_text,
)

__all__ = [
    "CPU_SENTENCE",
    "GIB",
    "IMPORTED_SENTENCE",
    "MIB",
    "NOISE",
    "VIRTUAL_SENTENCE",
    "AxisError",
    "Row",
    "Series",
    "Timing",
    "axis_cell",
    "axis_label",
    "axis_name",
    "caveats",
    "chosen",
    "details",
    "failure_of",
    "fragmented",
    "groups",
    "headline",
    "limits",
    "noteworthy",
    "ordered",
    "outcome",
    "pairs",
    "row_of",
    "series_of",
    "settings",
    "size_text",
    "table",
    "timing_of",
    "varying_axes",
    "verdicts",
]
