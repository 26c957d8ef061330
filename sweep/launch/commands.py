"""The command and the environment of a cell's processes. Everything torch must know before it starts is set here."""

import importlib.metadata
import os
import sys
from dataclasses import replace
from pathlib import Path

from sweep import virtual
from sweep.environment import visible_gpus
from sweep.spec import CellSpec, DeviceKind, EngineName

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def worker_arguments(directory: Path) -> list[str]:
    """What follows `python` to run one rank."""
    return ["-m", "sweep.worker", str(directory)]


def command(spec: CellSpec, directory: Path) -> list[str]:
    """One process where one is enough, else torch.distributed.run with as many as there are ranks."""
    worker = worker_arguments(directory)
    if spec.device.kind is DeviceKind.VIRTUAL or spec.processes == 1:
        return [sys.executable, *worker]
    options = [
        "--standalone",
        f"--nproc-per-node={spec.world_size}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
    ]
    return [sys.executable, "-m", "sweep.launch.elastic", *options, *worker]


def environment(spec: CellSpec, cell_id: str) -> dict[str, str]:
    """The parent's own, without what would change a result unnoticed."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTORCH_", "TORCHELASTIC_", "ACCELERATE_", "DS_", "VGPU_"))
        and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    paths = [str(REPOSITORY), inherited.get("PYTHONPATH", "")]
    inherited |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "SWEEP_CELL": cell_id,
        "SWEEP_PARENT_PID": str(os.getpid()),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.device.kind is DeviceKind.CPU:
        return inherited | _cpu(spec)
    inherited[allocator_variable()] = f"expandable_segments:{spec.expandable_segments}"
    if spec.device.kind is DeviceKind.VIRTUAL:
        inherited.pop("CUDA_VISIBLE_DEVICES", None)  # says something of real GPUs
        return inherited | _virtual(spec, inherited["PYTHONPATH"])
    # By UUID, because an index means one thing to CUDA and another to NVML.
    inherited["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in visible_gpus()[: spec.world_size])
    return inherited


def allocator_variable() -> str:
    """torch 2.9 renamed the allocator's variable; an older one silently ignores the new name."""
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return "PYTORCH_ALLOC_CONF" if (int(major), int(minor)) >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"


def _cpu(spec: CellSpec) -> dict[str, str]:
    """One arena and direct mappings for what is large, so that freed tensors leave the process (mallopt(3))."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // spec.world_size)),
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    }


def _virtual(spec: CellSpec, python_path: str) -> dict[str, str]:
    gpu = spec.device.gpu
    assert gpu is not None
    profile = virtual.gpus()[gpu.key]
    if gpu.total_memory_bytes is not None:
        profile = replace(profile, total_memory_bytes=gpu.total_memory_bytes)
    alone = spec.processes == 1 and spec.engine.name not in (EngineName.DEEPSPEED, EngineName.FSDP2)
    added = virtual.environment(
        profile,
        gpus=spec.world_size,
        world_size=None if alone else spec.world_size,
        other_processes_bytes=gpu.other_processes_bytes,
    )
    added["PYTHONPATH"] = os.pathsep.join(filter(None, [added.get("PYTHONPATH", ""), python_path]))
    return added | {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "1"}
