"""Two cells: by how much the peak differs, and what the difference is made of."""

from collections import Counter
from dataclasses import dataclass

from sweep.analysis import size_text
from sweep.explanation import Category, Explanation
from sweep.screen import title
from sweep.spec import to_json

NAMED = 0.1
"""Part of the difference from which a category is named."""
FEW = 3
"""Fields that make a name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceDifference:
    category: Category
    module: str
    before_bytes: int
    after_bytes: int

    @property
    def bytes(self) -> int:
        return self.after_bytes - self.before_bytes


def by_category(before: Explanation, after: Explanation) -> dict[Category, int]:
    """Of allocated memory; they add up to the difference of the two peaks."""
    return {
        category: after.categories.get(category, 0) - before.categories.get(category, 0)
        for category in Category
        if category.allocated and (category in before.categories or category in after.categories)
    }


def by_place(before: Explanation, after: Explanation) -> list[PlaceDifference]:
    """The largest first."""
    first, second = _sums(before), _sums(after)
    found = [
        PlaceDifference(category=category, module=module, before_bytes=first[key], after_bytes=second[key])
        for key in first | second
        for category, module in [key]
    ]
    return sorted(found, key=lambda one: -abs(one.bytes))


def _sums(one: Explanation) -> "Counter[tuple[Category, str]]":
    sums: Counter[tuple[Category, str]] = Counter()
    for place in one.places:
        sums[place.category, place.module] += place.bytes
    return sums


def sentence(before: Explanation, after: Explanation) -> str:
    """`+2.45 GiB: of which 2.44 GiB are weight copies; ...`"""
    total = after.allocated_bytes - before.allocated_bytes
    parts = sorted(by_category(before, after).items(), key=lambda part: -abs(part[1]))
    named = [part for part in parts if abs(part[1]) > NAMED * max(abs(total), 1)]
    pieces = [f"{signed(size)} {category.value}" for category, size in named]
    of = f": of which {', '.join(pieces)}" if pieces else ""
    return f"{signed(total)} at the peak{of}."


def notes(before: Explanation, after: Explanation) -> list[str]:
    """What a reader must know to read the difference."""
    found = []
    if (before.phase, before.micro_batch) != (after.phase, after.micro_batch):
        found.append(f"The peaks are at different moments: {moment(before)}, and {moment(after)}.")
    copies = after.categories.get(Category.WEIGHT_COPIES, 0)
    gradients = after.categories.get(Category.GRADIENTS, 0)
    beside = before.categories.get(Category.WEIGHT_COPIES, 0)
    if copies > beside + 0.02 * after.allocated_bytes and gradients and after.spec.accumulation > 1:
        found.append(
            f"In micro-batch {after.micro_batch + 1} of {after.spec.accumulation} autocast's copies of the weights "
            f"({size_text(copies)}) stand beside {size_text(gradients)} of gradients, which accumulation keeps. With "
            "one micro-batch there are no gradients yet when the copies are made."
        )
    whole = after.categories.get(Category.UNSHARDED_GRADIENTS, 0)
    if whole > 0.02 * after.allocated_bytes and after.spec.accumulation > before.spec.accumulation:
        found.append(
            f"Without synchronisation between micro-batches each rank keeps the gradient of the whole model unsharded: "
            f"{size_text(whole)}."
        )
    return found


def moment(one: Explanation) -> str:
    micro = f", micro-batch {one.micro_batch + 1} of {one.spec.accumulation}" if one.spec.accumulation > 1 else ""
    return f"{one.phase.value}{micro}"


def signed(size: int) -> str:
    return f"{'+' if size >= 0 else '-'}{size_text(abs(size))}"


def differing_fields(before: Explanation, after: Explanation) -> list[str]:
    """`accumulation 1 -> 2`, for every field of the spec."""
    return [f"{name} {first} -> {second}" for name, first, second in _differing(before, after)]


def names(before: Explanation, after: Explanation) -> tuple[str, str]:
    """What to call each of the two: what only it is, or what it is where they differ in much."""
    found = _differing(before, after)
    if not 0 < len(found) <= FEW:
        return title(before.spec), title(after.spec)
    first = ", ".join(f"{name.rpartition('.')[2].replace('_', ' ')} {value}" for name, value, _ in found)
    second = ", ".join(f"{name.rpartition('.')[2].replace('_', ' ')} {value}" for name, _, value in found)
    return first, second


def _differing(before: Explanation, after: Explanation) -> list[tuple[str, object, object]]:
    first, second = _flat(to_json(before.spec)), _flat(to_json(after.spec))
    every = first | second
    return [(name, first.get(name), second.get(name)) for name in every if first.get(name) != second.get(name)]


def _flat(content: object, path: str = "") -> dict[str, object]:
    if not isinstance(content, dict):
        return {path: content}
    flat: dict[str, object] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{path}.{key}".strip("."))
    return flat
