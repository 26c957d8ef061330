"""Real against virtual: `python -m sweep.gpu_check` on a machine with an NVIDIA GPU.

Runs a short list of cells on the GPU at hand, the same cells on the virtual GPU with that GPU's profile and the same
software, and prints both side by side. Both records of every pair are kept in results/gpu-check/. Needs torch,
transformers and accelerate, and a C compiler for the virtual half; neither Hydra nor DeepSpeed.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweep import models, virtual
from sweep.environment import Gpu, torch_cuda_version, visible_gpus
from sweep.launch import run_cell
from sweep.record import CellRecord, RankRecord, Status
from sweep.spec import CellSpec, DeviceKind, DeviceSpec, GpuSpec, from_json
from sweep.store import Store

GIB = 2**30
STATES_BYTES = 16
"""Per parameter: fp32 weights, gradients and AdamW's two moments."""
TIMEOUT_SECONDS = 60.0
"""Of one cell on the real GPU: eight of them, and as many on the virtual one, stay under eight minutes."""

FIGURES: dict[str, Callable[[RankRecord], int | None]] = {
    "allocated": lambda rank: rank.allocated_peak_bytes,
    "active": lambda rank: rank.active_peak_bytes,
    "reserved": lambda rank: rank.reserved_peak_bytes,
    "NVML": lambda rank: rank.nvml.used_peak_bytes if rank.nvml else None,
}


def specs(model: str) -> list[CellSpec]:
    """What is compared: checkpointing, batch size, expandable segments, precision and accumulation, one at a time."""
    base: dict[str, Any] = {
        "model": models.model(model),
        "engine": {"name": "ddp"},
        "device": {"kind": "cuda"},
        "world_size": 1,
        "batch_size": 1,
        "seq_len": 512,
        "timeout_seconds": TIMEOUT_SECONDS,
    }
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"batch_size": 4},
        {"gradient_checkpointing": True},
        {"batch_size": 4, "gradient_checkpointing": True},
        {"expandable_segments": True},
        {"precision": "fp32"},
        {"precision": "bf16_pure"},
        {"accumulation": 2},
    )
    return [from_json(CellSpec, base | change) for change in changes]


def choose_model(total_bytes: int) -> str:
    """The largest of three whose training state leaves half of the device to activations."""
    for name in ("llama3.2-1b", "qwen1.5-0.5b"):
        if models.model(name)["parameters"] * STATES_BYTES * 2 <= total_bytes:
            return name
    return "tiny"


def twin(spec: CellSpec, real: CellRecord, gpu: Gpu) -> CellSpec | None:
    """The same cell on the virtual GPU of that name, with the memory that the real one has; None without a profile."""
    key = next((profile.key for profile in virtual.gpus().values() if profile.name == gpu.name), None)
    if key is None or not real.ranks:
        return None
    device = GpuSpec(key=key, total_memory_bytes=real.ranks[0].capacity_bytes)
    return replace(spec, device=DeviceSpec(kind=DeviceKind.VIRTUAL, gpu=device))


def label(spec: CellSpec) -> str:
    parts = [f"batch {spec.batch_size}", spec.precision.value]
    parts += ["checkpointing"] if spec.gradient_checkpointing else []
    parts += ["expandable"] if spec.expandable_segments else []
    parts += [f"accumulation {spec.accumulation}"] if spec.accumulation > 1 else []
    return ", ".join(parts)


def lines(real: CellRecord, played: CellRecord | None) -> list[str]:
    """One pair: a line per figure, in GiB, with the difference in percent of the real one."""
    head = f"{label(real.spec)}: {real.status.value}" + (f", virtual {played.status.value}" if played else "")
    told = [head, *(f"    {why}" for record in (real, played) if record is not None for why in _whys(record))]
    if not real.ranks:
        return told
    for name, figure in FIGURES.items():
        measured = figure(real.ranks[0])
        virtual_ = figure(played.ranks[0]) if played and played.ranks else None
        told.append(f"    {name:<10}{_gib(measured)}{_gib(virtual_)}{_difference(measured, virtual_)}")
    return told


def _whys(record: CellRecord) -> list[str]:
    words = record.reason or (record.failure.message if record.failure else None)
    return [] if words is None else [f"{record.spec.device.kind.value}: {words.splitlines()[0][:200]}"]


def _gib(value: int | None) -> str:
    return f"{'-':>10}" if value is None else f"{value / GIB:>10.3f}"


def _difference(real: int | None, played: int | None) -> str:
    if not real or played is None:
        return f"{'-':>10}"
    return f"{'equal':>10}" if real == played else f"{100 * (played - real) / real:>+9.2f}%"


def compare(gpu: Gpu, cells: Sequence[CellSpec], store: Store) -> bool:
    """Run and print every pair. Gives whether every real cell came to an end that says something."""
    problem = virtual.check()
    if problem is not None:
        print(f"The virtual half is left out: {problem}")
    print(f"{gpu.name}, GiB: {'real':>14}{'virtual':>10}{'difference':>11}")
    sound = True
    for spec in cells:
        arguments = ["gpu-check", label(spec)]
        real = run_cell(spec, store, arguments, force=True)
        other = twin(spec, real, gpu) if problem is None else None
        if problem is None and other is None and real.ranks:
            problem = f"no profile is named {gpu.name}"
            print(f"The virtual half is left out: {problem}.")
        played = None if other is None else run_cell(other, store, arguments, force=True)
        print("\n".join(lines(real, played)), flush=True)
        sound &= real.status in (Status.OK, Status.OOM, Status.THRASHING)
    store.write_table()
    return sound


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sweep.gpu_check", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--model", choices=models.names())
    parser.add_argument("--cells", type=int, help="only the first so many cells")
    parser.add_argument("--results", type=Path, default=Path("results/gpu-check"))
    options = parser.parse_args(arguments)
    gpus = visible_gpus()
    if not gpus or torch_cuda_version() is None:
        why = "no NVIDIA GPU is visible" if not gpus else "the installed torch is a CPU build"
        print(f"gpu-check needs a real GPU, and {why}.", file=sys.stderr)
        return 2
    from sweep.nvml import Nvml

    model = options.model or choose_model(Nvml().device(gpus[0].uuid).total_bytes())
    store = Store(options.results)
    with store.lock():
        sound = compare(gpus[0], specs(model)[: options.cells], store)
    print(f"Records in {store.path}/")
    return 0 if sound else 3


if __name__ == "__main__":
    sys.exit(main())
