"""Values and outcomes in words: one way to say each, in every table and chart. Bytes inside, GiB in what is shown."""

import math
import textwrap

from sweep.record import CellRecord, Failure, Status

GIB = 2**30
MIB = 2**20


def axis_name(axis: str) -> str:
    if axis in ("gpu", "seq_len"):
        return {"gpu": "GPU", "seq_len": "sequence length"}[axis]
    return axis.rsplit(".", 1)[-1].replace("_", " ")


def axis_label(axis: str, value: object) -> str:
    """One value of one axis in words; empty where there is nothing to say."""
    match axis:
        case "gradient_checkpointing":
            return "checkpointing" if value else "no checkpointing"
        case "expandable_segments":
            return "expandable segments" if value else "no expandable segments"
        case "seq_len":
            return "" if value is None else f"sequence length {value}"
        case "optimizer":
            return {"adamw": "AdamW", "sgd": "SGD"}.get(str(value), str(value))
        case "workload":
            return "random tokens" if value == "synthetic" else str(value)
        case "engine":
            return {"ddp": "DDP", "fsdp2": "FSDP2", "device_map": "device map"}.get(str(value), str(value))
        case "gpu":
            return "" if value is None else str(value).removeprefix("NVIDIA ")
        case "device" | "model" | "precision":
            return str(value)
    if axis.endswith("_bytes") and isinstance(value, int):
        return f"{axis_name(axis).removesuffix(' bytes')} {size_text(value)}"
    if isinstance(value, bool):
        return axis_name(axis) if value else f"no {axis_name(axis)}"
    return f"{axis_name(axis)} {'none' if value is None else value}"


def axis_cell(axis: str, value: object) -> str:
    """One value of one axis as a table's cell, under the axis's own name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if axis in ("engine", "gpu", "optimizer", "workload"):
        return axis_label(axis, value)
    if axis.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    return "none" if value is None else str(value)


def size_text(size: int) -> str:
    """Bytes as people read them: `1.96 GiB`, `20 MiB`."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.{max(0, 2 - int(math.log10(max(1, size / GIB))))}f} GiB"
    return f"{size / MIB:.0f} MiB" if size >= MIB else f"{size} bytes"


def failure_of(record: CellRecord) -> Failure | None:
    return record.failure or next((rank.failure for rank in record.ranks if rank.failure), None)


def fragmented(failure: Failure) -> bool:
    """Whether an allocation failed although as much was free or cached, in pieces too small for it."""
    asked, free = failure.requested_bytes, failure.free_bytes
    allocated, reserved = failure.allocated_bytes, failure.reserved_bytes
    if asked is None or free is None or allocated is None or reserved is None:
        return False
    return free + reserved - allocated >= asked


def outcome(record: CellRecord, width: int = 100) -> str:
    """What became of a cell, in a few words: `OOM in backward, asked for 1.96 GiB`."""
    failure = failure_of(record)
    match record.status:
        case Status.OK:
            return "ok"
        case Status.OOM:
            text = "OOM"
            if failure and failure.phase:
                text += f" in {failure.phase.value}"
            if failure and fragmented(failure):
                text += " (fragmented)"
            if failure and failure.requested_bytes is not None:
                text += f", asked for {size_text(failure.requested_bytes)}"
            return text
        case Status.THRASHING:
            retries = max((rank.alloc_retries or 0 for rank in record.ranks), default=0)
            why = f"{retries} allocator retries" if retries else record.reason
        case _:
            why = record.reason or (f"{failure.kind}: {failure.message}" if failure else None)
    words = {Status.HOST_OOM: "host out of memory", Status.BUSY_DEVICE: "device busy"}
    text = words.get(record.status, record.status.value)
    joint = ", " if record.status is Status.THRASHING else ": "
    return textwrap.shorten(text + joint + why if why else text, width, placeholder=" ...")
