"""The environment of a child process that shall see virtual GPUs."""

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from sweep.virtual.build import DRIVER, NVML, compiler_obstacle, library_folder, machine_obstacle
from sweep.virtual.errors import VirtualGpuError
from sweep.virtual.profiles import GpuProfile
from sweep.virtual.torch_build import torch_build

LAGS = ("none", "until-sync", "simulated")
DEFAULT_LAG = "simulated"
MAX_GPUS = 64
_HOOK = Path(__file__).parent / "hook"

NCCL_BYTES_OF_TWO_RANKS = 544 << 20
NCCL_BYTES_OF_MORE_RANKS = 688 << 20
"""What one NCCL communicator takes beside PyTorch's memory: four A100 with NVLink, NVIDIA/nccl#964."""


def check() -> str | None:
    """None if this interpreter and machine can have virtual GPUs, else one sentence that says why not."""
    try:
        torch_build()
    except VirtualGpuError as error:
        return machine_obstacle() or str(error)
    return machine_obstacle() or compiler_obstacle()


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256(DEFAULT_LAG.encode())
    for path in sorted((*Path(__file__).parent.rglob("*.[ch]"), *_HOOK.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint(gpu: GpuProfile) -> str:
    """Changes with whatever may change a figure of this GPU: its profile, the library's sources, the lag."""
    return hashlib.sha256(f"{_sources_digest()} {gpu}".encode()).hexdigest()[:16]


def nccl_communicator_bytes(world_size: int) -> int:
    """What a communicator of that many ranks takes on a device."""
    if world_size < 2:
        return 0
    return NCCL_BYTES_OF_TWO_RANKS if world_size == 2 else NCCL_BYTES_OF_MORE_RANKS


def gpu_variables(
    gpu: GpuProfile,
    *,
    gpus: int | None = None,
    world_size: int | None = None,
    other_processes_bytes: int = 0,
    lag: str = DEFAULT_LAG,
) -> dict[str, str]:
    """The variables that say which GPU it is and which world the process is rank 0 of.

    The library reads them at the first CUDA call, so a forked child may still set them.
    """
    count = gpus if gpus is not None else (world_size or 1)
    if not 1 <= count <= MAX_GPUS:
        raise VirtualGpuError(f"gpus is {count}; give 1 to {MAX_GPUS}.")
    if world_size is not None and world_size < 1:
        raise VirtualGpuError(f"world_size is {world_size}; give 1 or more.")
    if lag not in LAGS:
        raise VirtualGpuError(f"lag is {lag!r}; give one of {', '.join(LAGS)}.")
    if not 0 <= other_processes_bytes < gpu.total_memory_bytes:
        raise VirtualGpuError(
            f"other_processes_bytes is {other_processes_bytes}; give 0 to {gpu.total_memory_bytes}, the GPU's memory."
        )
    values: dict[str, object] = {
        "VGPU_NAME": gpu.name,
        "VGPU_COUNT": count,
        "VGPU_COMPUTE_CAPABILITY": gpu.compute_capability,
        "VGPU_SM_COUNT": gpu.sm_count,
        "VGPU_MAX_THREADS_PER_SM": gpu.max_threads_per_sm,
        "VGPU_L2_BYTES": gpu.l2_bytes or 0,
        "VGPU_SHARED_PER_BLOCK_OPTIN_BYTES": gpu.shared_memory_per_block_optin_bytes,
        "VGPU_SHARED_PER_SM_BYTES": gpu.shared_memory_per_sm_bytes,
        "VGPU_TOTAL_MEMORY_BYTES": gpu.total_memory_bytes,
        "VGPU_NVML_TOTAL_BYTES": gpu.nvml_total_bytes or gpu.total_memory_bytes,
        "VGPU_CONTEXT_BYTES": gpu.assumed_context_bytes,
        "VGPU_OTHER_PROCESSES_BYTES": other_processes_bytes,
        "VGPU_NCCL_COMMUNICATOR_BYTES": nccl_communicator_bytes(world_size or count),
        "VGPU_LAG": lag,
        "VGPU_HALF_TFLOPS": gpu.bf16_dense_tflops or "",
        "VGPU_SINGLE_TFLOPS": gpu.fp32_tflops or "",
        "VGPU_MEMORY_GB_PER_SECOND": gpu.memory_bandwidth_gb_per_second or "",
        "VGPU_LINK_GB_PER_SECOND": gpu.nvlink_gb_per_second or "",
    }
    if world_size is not None:
        values |= {
            "VGPU_WORLD_SIZE": world_size,
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": min(world_size, count),
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }
    return {name: str(value) for name, value in values.items()}


def library_variables(base: Mapping[str, str]) -> dict[str, str]:
    """The variables that put the libraries in the place of the real ones, in front of what ``base`` has."""

    def before(present: str | None, first: str) -> str:
        return f"{first}:{present}" if present else first

    folder = library_folder()
    return {
        "LD_PRELOAD": before(base.get("LD_PRELOAD"), f"{folder / DRIVER}:{folder / NVML}"),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PYTHONPATH": before(base.get("PYTHONPATH"), str(_HOOK)),
        "VGPU_LIBRARY": str(folder / DRIVER),
        "VGPU_TORCH_FOLDER": str(torch_build().folder),
    }


def environment(
    gpu: GpuProfile,
    *,
    gpus: int | None = None,
    world_size: int | None = None,
    other_processes_bytes: int = 0,
    lag: str = DEFAULT_LAG,
) -> dict[str, str]:
    """The variables to add to a child's environment; the library is built first if need be.

    ``gpus`` is the number of devices the child sees: the world's size by default, else one. With ``world_size`` the
    child is rank 0 of a world in which no other process exists.
    """
    variables = gpu_variables(
        gpu, gpus=gpus, world_size=world_size, other_processes_bytes=other_processes_bytes, lag=lag
    )
    return {**variables, **library_variables(os.environ)}
