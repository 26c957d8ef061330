"""What is known of each GPU, from ``gpus.csv``. An unknown value is ``None``, never a guess."""

import csv
from dataclasses import dataclass
from pathlib import Path

from sweep.virtual.errors import VirtualGpuError

ASSUMED_CONTEXT_BYTES = 500 << 20
"""What a CUDA context is taken to occupy where nobody has measured it: measured ones are 100 to 700 MiB."""

_TABLE = Path(__file__).with_name("gpus.csv")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProfile:
    """One GPU as PyTorch sees it, and the rates of its datasheet.

    ``total_memory_bytes`` is what ``torch.cuda.mem_get_info()`` gives as total; ``nvml_total_bytes`` what NVML and
    nvidia-smi give, which includes what the driver keeps for itself.
    """

    key: str
    name: str
    compute_capability: str
    sm_count: int
    max_threads_per_sm: int
    l2_bytes: int | None
    shared_memory_per_block_optin_bytes: int
    shared_memory_per_sm_bytes: int
    total_memory_bytes: int
    nvml_total_bytes: int | None
    context_bytes: int | None
    bf16_dense_tflops: float | None
    tf32_dense_tflops: float | None
    fp32_tflops: float | None
    memory_bandwidth_gb_per_second: float | None
    nvlink_gb_per_second: float | None
    source: str

    def __post_init__(self) -> None:
        if self.total_memory_bytes < 1 << 30:
            raise VirtualGpuError(
                f"total_memory_bytes of {self.key} is {self.total_memory_bytes}; give at least 1 GiB (1073741824)."
            )

    @property
    def assumed_context_bytes(self) -> int:
        """The context's size, or the documented assumption where it is unknown."""
        return ASSUMED_CONTEXT_BYTES if self.context_bytes is None else self.context_bytes


def _whole(text: str) -> int | None:
    return int(text) if text else None


def _rate(text: str) -> float | None:
    return float(text) if text else None


def _profile(row: dict[str, str]) -> GpuProfile:
    return GpuProfile(
        key=row["key"],
        name=row["name"],
        compute_capability=row["compute_capability"],
        sm_count=int(row["sm_count"]),
        max_threads_per_sm=int(row["max_threads_per_sm"]),
        l2_bytes=_whole(row["l2_bytes"]),
        shared_memory_per_block_optin_bytes=int(row["shared_memory_per_block_optin_bytes"]),
        shared_memory_per_sm_bytes=int(row["shared_memory_per_sm_bytes"]),
        total_memory_bytes=int(row["total_memory_bytes"]),
        nvml_total_bytes=_whole(row["nvml_total_bytes"]),
        context_bytes=_whole(row["context_bytes"]),
        bf16_dense_tflops=_rate(row["bf16_dense_tflops"]),
        tf32_dense_tflops=_rate(row["tf32_dense_tflops"]),
        fp32_tflops=_rate(row["fp32_tflops"]),
        memory_bandwidth_gb_per_second=_rate(row["memory_bandwidth_gb_per_second"]),
        nvlink_gb_per_second=_rate(row["nvlink_gb_per_second"]),
        source=row["source"],
    )


def gpus() -> dict[str, GpuProfile]:
    """All profiles by key, in the order of the table."""
    with _TABLE.open(newline="", encoding="utf-8") as lines:
        return {row["key"]: _profile(row) for row in csv.DictReader(lines)}


def gpu(key: str) -> GpuProfile:
    """The profile of a key such as ``a100-80gb``; a ``VirtualGpuError`` that lists the keys if there is none."""
    known = gpus()
    if key not in known:
        raise VirtualGpuError(f"There is no GPU profile {key!r}; choose one of {', '.join(known)}.")
    return known[key]
