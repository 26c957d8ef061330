"""From a block's life and what was seen of it to a category and a place."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.explanation import Category, Place
from sweep.record import Phase
from sweep.worker.explain.owners import Owner
from sweep.worker.explain.recorder import RELEASED, SCOPE_END, SHAPE_ONLY, Recorder, Step
from sweep.worker.explain.replay import SMALL, History, Life

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "addmv", "mv")
# Python code of the engines that allocates, by the end of the file's name and the function.
ENGINE_CODE: tuple[tuple[str, str, Category], ...] = (
    ("zero/partition_parameters.py", "gather", Category.GATHERED_PARAMETERS),
    ("zero/partition_parameters.py", "partition", Category.COMMUNICATION),
    ("zero/stage3.py", "reduce|ipg|bucket|average|partition_grads", Category.COMMUNICATION),
    ("zero/stage_1_and_2.py", "partition", Category.GRADIENTS),
    ("zero/stage_1_and_2.py", "reduce|ipg|bucket|average", Category.COMMUNICATION),
    ("runtime/comm/coalesced_collectives.py", "", Category.COMMUNICATION),
    ("_fully_shard/_fsdp_collectives.py", "all_gather", Category.GATHERED_PARAMETERS),
    ("_fully_shard/_fsdp_collectives.py", "reduce", Category.COMMUNICATION),
    ("_fully_shard/_fsdp_param.py", "all_gather|unshard", Category.GATHERED_PARAMETERS),
    ("_fully_shard/_fsdp_param.py", "grad", Category.UNSHARDED_GRADIENTS),
)
HERE = str(Path(__file__).parent)
PASSED_OVER = ("/site-packages/torch/", "/deepspeed/utils/nvtx.py")
"""Files that only call what allocates."""


@dataclass(frozen=True, slots=True)
class Attribution:
    category: Category
    module: str
    made_by: str
    source: str
    shape: tuple[int, ...] | None
    dtype: str | None
    released: bool = False


class Attributor:
    def __init__(
        self,
        history: History,
        owners: Mapping[int, Owner],
        recorder: Recorder,
        workspaces: set[int],
        buckets: Sequence[int] = (),
    ) -> None:
        self._owners, self._workspaces, self._buckets = owners, workspaces, buckets
        self._labels, self._steps, self._is_logits = recorder.labels, recorder.steps, recorder.is_wide
        self.phases: list[tuple[int, Phase, int]] = []
        self._scope_ends: dict[int, int] = {}
        self._releases: dict[int, list[int]] = defaultdict(list)
        for time, text in history.marks:
            word, _, number = text.partition(" ")
            if word == SCOPE_END:
                self._scope_ends[int(number)] = time
            elif word == RELEASED:
                self._releases[int(number)].append(time)
            else:
                self.phases.append((time, Phase(word), int(number)))

    def phase_at(self, time: int) -> tuple[Phase, int]:
        began = [(phase, micro) for start, phase, micro in self.phases if start <= time]
        return began[-1] if began else (Phase.FORWARD, 0)

    def step_of(self, life: Life) -> Step | None:
        return self._steps[int(life.step)] if life.step else None

    def attribute(self, life: Life) -> Attribution:
        step = self.step_of(life)
        tensor = self._tensor(life, step)
        shape, dtype = tensor or (None, None)
        noted = self._noted(life)
        if life.start is None:
            owner = self._owners.get(life.address)
            if owner is not None and owner.category is not Category.UNATTRIBUTED:
                return Attribution(owner.category, owner.name, "", "", owner.shape, owner.dtype)
            if noted is not None:
                return Attribution(noted.category, noted.name, "", "", noted.shape, noted.dtype)
            if life.address in self._workspaces:
                return Attribution(Category.WORKSPACES, "", "cuBLAS", "", None, None)
            if owner is None and any(size <= life.size <= size + SMALL for size in self._buckets):
                return Attribution(Category.COMMUNICATION, "bucket of DistributedDataParallel", "", "", None, None)
            if owner is not None:
                return Attribution(owner.category, owner.name, "", "", owner.shape, owner.dtype)
            return Attribution(Category.UNATTRIBUTED, "", "", "", None, None)
        category = self._category(life, step, tensor, noted)
        module = step.module if step else ""
        if noted is not None and noted.category is category:
            module = noted.name
            shape, dtype = shape or noted.shape, dtype or noted.dtype
        elif step is not None and step.weight:
            module = step.weight
        made_by = "" if step is None else step.name or step.node
        released = category is Category.GATHERED_PARAMETERS and any(map(life.lives_at, self._releases[life.address]))
        return Attribution(category, module, made_by, source(life.frames), shape, dtype, released)

    def _tensor(self, life: Life, step: Step | None) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype of what the operator put there."""
        outputs = step.outputs if step else ()
        made = next(((shape, dtype) for where, shape, dtype in outputs if where == life.address), None)
        seen = next((one for one in self._labels_of(life) if one.category is SHAPE_ONLY), None)
        return made if made is not None or seen is None else (seen.shape, seen.dtype)

    def _labels_of(self, life: Life) -> list[Owner]:
        return [self._labels[int(text)] for _, text in life.notes]

    def _noted(self, life: Life) -> Owner | None:
        found = [one for one in self._labels_of(life) if one.category is not SHAPE_ONLY]
        certain = [one for one in found if one.certain]
        better = [one for one in found if one.category is not Category.COMMUNICATION]
        return next(iter(certain or better or found), None)

    def _category(
        self, life: Life, step: Step | None, tensor: tuple[tuple[int, ...], str] | None, noted: Owner | None
    ) -> Category:
        engine = _engine_category(life.frames)
        if noted is not None and noted.certain:
            return noted.category
        if engine is Category.COMMUNICATION:
            return engine  # parameters and gradients may be parts of a buffer
        if noted is not None and noted.category is not Category.COMMUNICATION:
            return noted.category
        if engine is not None:
            return engine
        if noted is not None:
            return noted.category
        if step is None:
            return Category.UNATTRIBUTED if not life.frames else Category.TEMPORARIES
        if step.weight:
            return Category.WEIGHT_COPIES
        if life.address in self._workspaces or (tensor is None and step.name.partition(".")[0] in MATRIX_PRODUCTS):
            return Category.WORKSPACES
        if self._is_logits(tensor[0]) if tensor else step.wide:
            return Category.LOGITS
        if self._is_kept(life, step):
            return Category.ACTIVATIONS
        return Category.TEMPORARIES

    def _is_kept(self, life: Life, step: Step) -> bool:
        """Whether a forward pass, or a recomputation, made it and left it for the backward pass."""
        assert life.start is not None
        if step.scope:
            end = self._scope_ends.get(step.scope, life.start)
            return life.end is None or life.end > end
        phase, _ = self.phase_at(life.start)
        if phase is not Phase.FORWARD or step.node:
            return False
        over = next((time for time, phase, _ in self.phases if time > life.start and phase is not Phase.FORWARD), None)
        return life.end is None or (over is not None and life.end > over)


def _engine_category(frames: Sequence[Mapping[str, Any]]) -> Category | None:
    for frame in frames:
        file = frame["filename"]
        for ending, functions, category in ENGINE_CODE:
            if file.endswith(ending) and re.search(functions, frame["name"]):
                return category
    return None


def source(frames: Sequence[Mapping[str, Any]]) -> str:
    """`transformers/models/llama/modeling_llama.py:120`: the innermost frame outside PyTorch and this package."""
    for frame in frames:
        file = frame["filename"]
        if not any(part in file for part in PASSED_OVER) and not file.startswith((HERE, "<")):
            short = file.rpartition("/site-packages/")[2] if "/site-packages/" in file else _own(file)
            return f"{short}:{frame['line']}"
    return ""


def _own(file: str) -> str:
    return file[file.rfind("/sweep/") + 1 :] if "/sweep/" in file else Path(file).name


def places(found: Sequence[tuple[Life, Attribution]]) -> tuple[Place, ...]:
    """Alike ones together: the same category, operator, source, dtype and module, whatever the layer's number."""
    groups: dict[tuple[object, ...], list[tuple[Life, Attribution]]] = defaultdict(list)
    for life, one in found:
        groups[one.category, collapsed(one.module), one.made_by, one.source, one.dtype].append((life, one))
    made = []
    for (_, module, *_), members in groups.items():
        one = max(members, key=lambda member: member[0].size)[1]
        made.append(
            Place(
                category=one.category,
                module=str(module),
                made_by=one.made_by,
                source=one.source,
                shape=one.shape,
                dtype=one.dtype,
                count=len(members),
                bytes=sum(life.size for life, _ in members),
                released_bytes=sum(life.size for life, each in members if each.released),
            )
        )
    return tuple(sorted(made, key=lambda place: -place.bytes))


def collapsed(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
