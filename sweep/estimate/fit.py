"""Fits a GPU's factors to cells whose time was measured.

Four things are adjusted, each as a whole: arithmetic, memory, communication and the host. Few cells cannot tell more
apart, and cells alike cannot even tell these: so every adjustment is drawn to none, as strongly as the defaults are
trusted, and only what the measurements insist on moves. A fitted part of the bandwidth above 1 says that less was moved
than was counted. Caches hardly explain it: what one operator leaves in the L2 cache for the next one was found to be
below 1% of the bytes of a 0.5B model on an RTX 3090, and at most 2.3% of those of an 8B model on an A100.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sweep.estimate.factors import Calibration, Factors
from sweep.estimate.model import rates_of, seconds_per_iteration
from sweep.estimate.work import Work
from sweep.virtual import GpuProfile

FASTER: Mapping[str, tuple[str, ...]] = {
    "arithmetic": ("matmul_half", "matmul_tf32", "matmul_single", "attention_flash", "attention_efficient"),
    "memory": ("memory",),
    "communication": ("link", "slow_link_bytes_per_second", "network_bytes_per_second"),
    "host": (),
}
"""Factors that grow where a part gets faster; the host's are times, which shrink."""
HOST_SECONDS = ("operation_seconds", "launch_seconds", "collective_call_seconds", "kernel_seconds")
TRUST = {"arithmetic": 0.2, "memory": 0.2, "communication": 0.3, "host": 0.5}
"""By how much, in logarithms, a default may be wrong: one standard deviation."""
NOISE = 0.02
"""Of a measurement against the model at its best."""
ROUNDS, STEP = 8, 0.05
SMALLEST_UNCERTAINTY = 0.10
"""Cells unlike the fitted ones are less sure: a size half of the smallest fitted one was found 9% off."""


Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A cell with its measured time and its counted work."""

    work: Work
    seconds_per_iteration: float


def adjusted(factors: Factors, logarithms: Mapping[str, float]) -> Factors:
    """The factors with each part faster by the exponential of its number."""
    scales = {name: float(np.exp(value)) for name, value in logarithms.items()}
    changed = {field: getattr(factors, field) * scales[part] for part, fields in FASTER.items() for field in fields}
    return replace(factors, **changed, **{field: getattr(factors, field) / scales["host"] for field in HOST_SECONDS})


def errors(cells: Sequence[Measured], gpu: GpuProfile, factors: Factors) -> list[float]:
    """Relative errors of the estimates, one a cell."""
    rates = rates_of(gpu, factors)
    assert rates is not None, "checked by fit"
    return [seconds_per_iteration(cell.work, rates)[0] / cell.seconds_per_iteration - 1 for cell in cells]


def fit(cells: Sequence[Measured], gpu: GpuProfile, source: str, start: Factors | None = None) -> Calibration:
    """Gauss-Newton on logarithms of the times, with the trust in the defaults as a prior. Raises `ValueError`."""
    if not cells or rates_of(gpu, Factors()) is None:
        raise ValueError(f"nothing to fit {gpu.key} to: it takes measured cells, and a profile with its rates")
    start, parts = start or Factors(), list(TRUST)
    found = np.zeros(len(parts))

    def residuals(logarithms: Vector) -> Vector:
        factors = adjusted(start, dict(zip(parts, logarithms, strict=True)))
        return np.log1p(errors(cells, gpu, factors)) / NOISE

    prior = np.diag([1 / TRUST[part] for part in parts])
    for _ in range(ROUNDS):
        now = residuals(found)
        slopes = np.stack([(residuals(found + STEP * unit) - now) / STEP for unit in np.eye(len(parts))], axis=1)
        matrix, target = np.vstack([slopes, prior]), np.concatenate([-now, -prior @ found])
        change = np.linalg.lstsq(matrix, target, rcond=None)[0]
        found = found + np.clip(change, -0.5, 0.5)
        if np.abs(change).max() < 1e-3:
            break
    factors = adjusted(start, dict(zip(parts, map(float, found), strict=True)))
    left = [abs(error) for error in errors(cells, gpu, factors)]
    return Calibration(
        gpu=gpu.key,
        factors=factors,
        uncertainty=max(SMALLEST_UNCERTAINTY, 2 * float(np.sqrt(np.mean(np.square(left))))),
        cells=len(cells),
        source=source,
        median_error=statistics.median(left),
        largest_error=max(left),
    )
