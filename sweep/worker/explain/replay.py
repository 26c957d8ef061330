"""The allocator's history played again: which block lived from when to when, and how large it was. Needs no GPU.

PyTorch records how much was asked for; what counts as allocated is the block that was given. Its size follows from the
rules of `CUDACachingAllocator.cpp`: requests are rounded up to 512 bytes, and the rest of the free block is split off
when it is large enough: 512 bytes in the pool of small blocks and in expandable segments, more than 1 MiB elsewhere.
"""

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIN_BLOCK = 512
SMALL = 1 << 20
"""Requests up to this size come from the pool of small blocks; in the other pool a larger rest is split off."""
SMALL_SEGMENT = 2 << 20
MARK = "@"


@dataclass(slots=True)
class Life:
    """One block from its allocation to its end. Times are positions in the history; None is before or after it."""

    address: int
    size: int
    start: int | None
    end: int | None = None
    step: str = ""
    """What was written into the history's metadata when it was allocated."""
    frames: Sequence[Mapping[str, Any]] = ()
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Annotations, with their time."""

    def lives_at(self, time: int) -> bool:
        return (self.start is None or self.start <= time) and (self.end is None or self.end > time)


@dataclass(frozen=True, slots=True)
class History:
    lives: Sequence[Life]
    marks: Sequence[tuple[int, str]]
    """Annotations that begin with `MARK`, without it: they say when, and not what, a block is."""
    allocated: Sequence[int]
    """In bytes, after each event."""
    reserved: Sequence[int]

    @property
    def peak_time(self) -> int:
        """Of the first event at which allocated memory was highest."""
        return max(range(len(self.allocated)), key=self.allocated.__getitem__)


class _Layout:
    """Where segments and occupied blocks lie, as far as the sizes of blocks depend on it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._occupied: list[int] = []

    def add(self, start: int, size: int) -> None:
        """A segment of the pool of large blocks."""
        insort(self._starts, start)
        self._ends[start] = start + size

    def remove(self, start: int) -> None:
        if self._ends.pop(start, None) is not None:
            self._starts.remove(start)

    def occupy(self, address: int) -> None:
        insort(self._occupied, address)

    def leave(self, address: int) -> None:
        at = bisect_right(self._occupied, address) - 1
        if at >= 0 and self._occupied[at] == address:
            del self._occupied[at]

    def block_size(self, address: int, requested: int) -> int:
        """Of the block that is given out at this address."""
        rounded = max(MIN_BLOCK, -(-requested // MIN_BLOCK) * MIN_BLOCK)
        at = bisect_right(self._starts, address) - 1
        end = self._ends[self._starts[at]] if at >= 0 else 0
        if address >= end:
            return rounded
        following = bisect_right(self._occupied, address)
        rest = min([end, *self._occupied[following : following + 1]]) - address - rounded
        return rounded if rest > SMALL else rounded + max(0, rest)


def play(segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]]) -> History:
    """From the segments of a snapshot at the start and the history since then, both as `_snapshot` gives them."""
    layout = _Layout()
    living: dict[int, Life] = {}
    lives: list[Life] = []
    allocated, held = 0, 0
    for one in segments:
        held += one["total_size"]
        if one["segment_type"] == "large" and not one["is_expandable"]:
            layout.add(one["address"], one["total_size"])
        for block in one["blocks"]:
            if block["state"] == "inactive":
                continue
            layout.occupy(block["address"])
            if block["state"] == "active_allocated":
                life = living[block["address"]] = Life(block["address"], block["size"], None)
                lives.append(life)
                allocated += life.size
    marks: list[tuple[int, str]] = []
    totals, reserved = [], []
    for time, event in enumerate(trace):
        action, address = event["action"], event.get("addr", 0)
        if action == "alloc":
            size = layout.block_size(address, event["size"])
            life = Life(address, size, time, None, event.get("user_metadata", ""), event.get("frames", ()))
            living[address] = life
            lives.append(life)
            layout.occupy(address)
            allocated += size
        elif action == "free_requested" and address in living:
            life = living.pop(address)
            life.end = time
            allocated -= life.size
        elif action == "free_completed":
            layout.leave(address)
        elif action in ("segment_alloc", "segment_map"):
            held += event["size"]
            if action == "segment_alloc" and event["size"] > SMALL_SEGMENT:
                layout.add(address, event["size"])
        elif action in ("segment_free", "segment_unmap"):
            held -= event["size"]
            layout.remove(address)
        elif action == "annotate":
            text = event["user_metadata"]
            if text.startswith(MARK):
                marks.append((time, text.removeprefix(MARK)))
            elif address in living:
                living[address].notes.append((time, text))
        totals.append(allocated)
        reserved.append(held)
    return History(lives, marks, totals, reserved)
