"""What part of a datasheet's rates real work reaches, and what a call costs: the model's only free numbers.

The defaults come from datasheets, libraries' own documentation and general experience, and from no table that the
estimates are compared with. A GPU's own factors, fitted by `sweep calibrate`, are kept in `calibration/<gpu>.json`.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from sweep.spec import SpecError, from_json, to_json

CALIBRATION = Path("calibration")
MODEL = "roofline 1"
UNCERTAINTY = 0.25
"""Of the default factors: each is known to about a fifth, and errors of several partly cancel. Ranking configurations
of one GPU is safer than that, for they share the error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Parts of the datasheet's peak unless a unit is named."""

    matmul_half: float = 0.80
    """cuBLAS on large products: the best shapes reach 86% (A100) and 80% (H100) of the dense peak in the table of
    maximum achievable rates of stas00/ml-engineering; tiles that do not fill the GPU come on top, counted by shape."""
    geforce_clock: float = 1.25
    """GeForce cards run above the clock of their datasheet: an RTX 3090 Ti reaches 81 TFLOP/s in fp16, and 0.80 of what
    that clock gives would be 64 (mli/transformers-benchmarks). Multiplies all rates of arithmetic."""
    matmul_tf32: float = 0.75
    matmul_single: float = 0.85
    attention_flash: float = 0.50
    """FlashAttention-2, causal, 2048 tokens, forward and backward: about half of the A100's peak (arXiv:2307.08691)."""
    attention_efficient: float = 0.30
    """The memory-efficient kernels (CUTLASS, xFormers) in the same paper's figures: 90 to 110 of 312 TFLOP/s."""
    memory: float = 0.80
    """Copies reach 85 to 90% of the bandwidth (BabelStream); reductions and transposed reads less. Multiplying a vector
    reaches 79% on an A100, 85% on an RTX 3090 Ti (mli/transformers-benchmarks)."""
    link: float = 0.75
    """Of NVLink one way, half of the datasheet's figure: large all-gathers reach 220 to 235 of 300 GB/s (nccl-tests on
    eight A100 with NVSwitch)."""
    collective_contention: float = 0.19
    """Part of a collective's time by which computation beside it takes longer: the mean that arXiv:2507.03114 measured
    on A100, H100 and others."""
    slow_link_bytes_per_second: float = 10e9
    """Collectives of GPUs without NVLink, over PCIe 4.0 and without peer access."""
    network_bytes_per_second: float = 20e9
    """Collectives of more ranks than one machine has: one 200 Gb/s adapter a GPU, 80% of it."""
    pcie_bytes_per_second: float = 20e9
    """PCIe 4.0 x16, pinned memory."""
    kernel_seconds: float = 2e-6
    """From the end of one kernel to the full speed of the next one on the same stream."""
    collective_seconds: float = 25e-6
    """Of one collective beside its bytes: 20 to 30 microseconds for small messages on eight GPUs (nccl-tests)."""
    operation_seconds: float = 3e-6
    """Of the host: one operator of eager PyTorch, views included, with its Python and its autograd node."""
    launch_seconds: float = 7e-6
    """Of the host, beside that: one kernel. An operator that launches one costs about 10 microseconds in all."""
    collective_call_seconds: float = 50e-6
    """Of the host: one collective through torch.distributed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The factors of one GPU, and what is known of them."""

    gpu: str
    """A profile's key."""
    factors: Factors = field(default_factory=Factors)
    uncertainty: float = UNCERTAINTY
    cells: int = 0
    """That the factors were fitted to; 0 for the defaults."""
    source: str | None = None
    """Of the cells."""
    median_error: float | None = None
    largest_error: float | None = None
    """Relative, of the fitted cells themselves."""

    @property
    def model(self) -> str:
        return (
            f"{MODEL}, default factors" if not self.cells else f"{MODEL}, fitted to {self.cells} cells ({self.source})"
        )

    def save(self, folder: Path = CALIBRATION) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.gpu}.json"
        path.write_text(json.dumps(to_json(self), indent=2) + "\n", encoding="utf-8")
        return path


def calibration_of(gpu: str, folder: Path = CALIBRATION) -> Calibration:
    """The GPU's own factors where it was calibrated, else the defaults. Raises `SpecError` for a damaged file."""
    path = folder / f"{gpu}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Calibration(gpu=gpu)
    except (OSError, ValueError) as error:
        raise SpecError(
            str(path), None, f"it cannot be read ({error}); run sweep calibrate again or delete it"
        ) from error
    return replace(from_json(Calibration, content, f"{path}: "), gpu=gpu)
