"""The work of one iteration, in the order in which it is issued, and the file that keeps it."""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

FILE_NAME = "work.json.gz"
VERSION = 1


class Kind(str, Enum):
    """What a step does. The first six occupy a stream, the others order streams and the host."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"
    """Whatever is bound by memory bandwidth: elementwise operators, reductions, copies on the device, optimizers."""
    UNKNOWN = "unknown"
    """Kernels from outside PyTorch's operators (Triton): their bytes are guessed from their threads."""
    PCIE = "pcie"
    COLLECTIVE = "collective"
    RECORD = "record"
    WAIT = "wait"
    HOST_EVENT = "host-event"
    HOST_STREAM = "host-stream"
    HOST_ALL = "host-all"


OCCUPIES_STREAM = frozenset((Kind.MATMUL, Kind.ATTENTION, Kind.MEMORY, Kind.UNKNOWN, Kind.PCIE, Kind.COLLECTIVE))


class Step(NamedTuple):
    """One step, or several alike that follow one another on one stream.

    `detail` is the dtype class of matrix products and of attention (`half`, `tf32`, `single`), for attention in half
    the implementation instead (`flash`, `efficient`, `cudnn`, `other`), the kind of a collective.
    """

    kind: Kind
    operations: int
    """That the host dispatched since the step before: each costs host time, views included."""
    stream: int
    event: int = -1
    """Recorded or awaited; -1 for none."""
    launches: int = 0
    """Kernels, copies or collectives."""
    flops: float = 0.0
    tile_flops: float = 0.0
    """Of matrix products: the operations if all multiprocessors were busy until the last tile is done."""
    bytes: float = 0.0
    """Read and written in device memory; over PCIe; over each device's link of a collective."""
    ranks: int = 0
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One iteration, that is one optimizer step with its accumulated passes, of rank 0."""

    steps: tuple[Step, ...]

    def save(self, directory: Path) -> None:
        """Write the file of a cell. The same work gives the same bytes."""
        content = {"version": VERSION, "fields": Step._fields, "steps": [[*step] for step in self.steps]}
        text = json.dumps(content, separators=(",", ":"))
        (directory / FILE_NAME).write_bytes(gzip.compress(text.encode(), mtime=0))

    def totals(self) -> dict[str, float]:
        """Sums by what they are of, such as `matmul.half.flops` or `collective.all_gather.bytes`."""
        sums: dict[str, float] = defaultdict(float)
        for step in self.steps:
            sums["operations"] += step.operations
            if step.kind not in OCCUPIES_STREAM:
                continue
            name = f"{step.kind.value}.{step.detail}" if step.detail else step.kind.value
            sums[f"{name}.count"] += step.launches
            sums[f"{name}.bytes"] += step.bytes
            if step.flops:
                sums[f"{name}.flops"] += step.flops
        return dict(sorted(sums.items()))


def read_work(directory: Path) -> Work | None:
    """The work that a cell's folder has; None where it was not counted, or by another version."""
    return read_file(directory / FILE_NAME)


def read_file(path: Path) -> Work | None:
    """The same of one file."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError):
        return None
    if content.get("version") != VERSION:
        return None
    return Work(steps=tuple(Step(Kind(kind), *rest) for kind, *rest in content["steps"]))
