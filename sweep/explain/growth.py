"""Which category grows with the batch size, and by how much per sample: a straight line through each category."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sweep.analysis import size_text
from sweep.explanation import Category, Explanation

GROWS = 0.01
"""Part of the growth of the whole from which a category is said to grow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """`bytes = constant + per_sample * batch_size`, by least squares."""

    category: Category
    constant_bytes: float
    per_sample_bytes: float
    largest_deviation_bytes: float
    """Of a measured point from the line."""

    def per_token_bytes(self, seq_len: int) -> float:
        return self.per_sample_bytes / seq_len


def growth(series: Sequence[Explanation]) -> list[Growth]:
    """Of cells that differ in batch size alone, two or more; in the order of the categories."""
    sizes = [one.spec.batch_size for one in series]
    found = []
    for category in Category:
        heights = [one.categories.get(category, 0) for one in series]
        if category.allocated and any(heights):
            slope, intercept = statistics.linear_regression(sizes, heights)
            off = max(abs(intercept + slope * size - height) for size, height in zip(sizes, heights, strict=True))
            found.append(
                Growth(
                    category=category,
                    constant_bytes=intercept,
                    per_sample_bytes=slope,
                    largest_deviation_bytes=off,
                )
            )
    return found


def sentences(series: Sequence[Explanation]) -> list[str]:
    lines = growth(series)
    total = sum(max(0.0, line.per_sample_bytes) for line in lines)
    tokens = series[0].spec.seq_len
    growing = [line for line in lines if abs(line.per_sample_bytes) > GROWS * total]
    found = [
        f"{line.category.value}: {size_text(round(line.per_sample_bytes))} per sample, "
        f"{line.per_token_bytes(tokens) / 1024:,.1f} KiB per token"
        for line in sorted(growing, key=lambda line: -line.per_sample_bytes)
    ]
    constant = ", ".join(line.category.value for line in lines if line not in growing)
    found += [f"constant: {constant}"] if constant else []
    worst = max(lines, key=lambda line: line.largest_deviation_bytes)
    if len(series) > 2 and worst.largest_deviation_bytes > 0.01 * series[-1].allocated_bytes:
        found.append(
            f"not on a straight line: {worst.category.value}, by up to "
            f"{size_text(round(worst.largest_deviation_bytes))}: the peak moves to another moment"
        )
    return found
