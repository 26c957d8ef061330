"""What would bring the peak down: rules over an explanation, each a plain sentence with its number.

A rule says what it would save and, where the sweep can, which change to the cell does it; `sweep.explain.savings` runs
that cell. Rules look at the moment of the peak: what is large at another moment does not count.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sweep.analysis import size_text
from sweep.explanation import Category, Explanation, Place
from sweep.record import CellRecord, Phase, Status
from sweep.spec import CellSpec, EngineName, Loss, Precision, SpecError, from_json, to_json

NOTABLE = 0.02
"""Part of the peak below which a finding is not worth a line."""


class Counter(str, Enum):
    """Which of the allocator's peaks the change lowers."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    rule: str
    sentence: str
    saves_bytes: int
    """At this moment of this peak; after the change another moment may be the highest."""
    counter: Counter = Counter.ALLOCATED
    advice: str
    """What to do, beginning with a verb."""
    changes: Mapping[str, Any] | None = None
    """Fields of the spec, by their dotted names, that do it; None where the sweep has no such option."""


Rule = Callable[[Explanation, CellRecord | None], Finding | None]


def apply_rules(one: Explanation, record: CellRecord | None) -> list[Finding]:
    """All that apply, the largest saving first."""
    found = [finding for rule in RULES if (finding := rule(one, record)) is not None]
    return sorted(found, key=lambda finding: -finding.saves_bytes)


def changed(spec: CellSpec, changes: Mapping[str, Any]) -> CellSpec | None:
    """The spec with these fields; None where this combination does not exist."""
    content = to_json(spec)
    for path, value in changes.items():
        *parents, name = path.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place[name] = value
    try:
        return from_json(CellSpec, content)
    except SpecError:
        return None


def _of(one: Explanation, category: Category) -> int:
    return one.categories.get(category, 0)


def _places(one: Explanation, category: Category) -> Iterator[Place]:
    return (place for place in one.places if place.category is category)


def _notable(one: Explanation, size: int) -> bool:
    return size > NOTABLE * one.allocated_bytes


def gathered_weights_held(one: Explanation, _: CellRecord | None) -> Finding | None:
    held = sum(place.released_bytes for place in _places(one, Category.GATHERED_PARAMETERS))
    if not _notable(one, held):
        return None
    # DeepSpeed has a linear layer of its own that saves the partitioned parameter (deepspeed/runtime/zero/linear.py);
    # PyTorch's saves the gathered weight. zero.Init puts it in place, recent versions of `initialize` as well, unless
    # `memory_efficient_linear` is off.
    engine = one.spec.engine
    changes: dict[str, Any] = {"engine.zero_init": True} if engine.zero_init is False else {}
    if engine.memory_efficient_linear is False:
        changes["engine.memory_efficient_linear"] = True
    if (engine.config or {}).get("zero_optimization", {}).get("memory_efficient_linear") is False:
        changes["engine.config.zero_optimization.memory_efficient_linear"] = True
    return Finding(
        rule="gathered weights held for backward",
        sentence=f"{size_text(held)} are gathered weights that the engine has released again: linear layers saved "
        "them for the backward pass, so that parameter sharding saves little",
        saves_bytes=held,
        advice="build the model under deepspeed.zero.Init, with memory_efficient_linear left on: linear layers then "
        "save the partitioned parameter",
        changes=changes or None,
    )


def full_logits(one: Explanation, _: CellRecord | None) -> Finding | None:
    logits = _of(one, Category.LOGITS)
    full = [place for place in _places(one, Category.LOGITS) if place.dtype == "float32"]
    size = sum(place.bytes for place in full)
    if not _notable(one, size):
        return None
    copies = sum(place.count for place in full)
    return Finding(
        rule="full logits in fp32",
        sentence=f"{size_text(logits)} are logits and their gradients, {size_text(size)} of it as {copies} fp32 "
        f"tensors over the whole vocabulary of {one.spec.model.config.get('vocab_size')}",
        saves_bytes=logits,
        advice="compute the loss in chunks: Liger's fused linear cross-entropy never holds all logits",
        changes={"loss": "fused"} if one.spec.loss is Loss.FULL else None,
    )


def weight_copies_beside_gradients(one: Explanation, _: CellRecord | None) -> Finding | None:
    # The cache is torch.autocast's `cache_enabled`, on by default: https://docs.pytorch.org/docs/stable/amp.html
    copies, gradients = _of(one, Category.WEIGHT_COPIES), _of(one, Category.GRADIENTS)
    spec = one.spec
    if not _notable(one, copies) or not _notable(one, gradients) or spec.accumulation == 1 or one.micro_batch == 0:
        return None
    return Finding(
        rule="weight copies beside resident gradients",
        sentence=f"{size_text(copies)} are {spec.precision.value} copies of weights, which autocast caches while it is "
        f"in force, beside {size_text(gradients)} of gradients that accumulation keeps from the micro-batch before",
        saves_bytes=copies,
        advice=f"take one micro-batch of {spec.batch_size * spec.accumulation} in place of {spec.accumulation} of "
        f"{spec.batch_size}, if its activations are smaller than that",
        changes={"accumulation": 1, "batch_size": spec.batch_size * spec.accumulation},
    )


def unsharded_gradients(one: Explanation, _: CellRecord | None) -> Finding | None:
    size = _of(one, Category.UNSHARDED_GRADIENTS)
    spec = one.spec
    if spec.accumulation == 1 or spec.engine.name is not EngineName.FSDP2 or not _notable(one, size):
        return None
    share = size * (spec.world_size - 1) // spec.world_size
    return Finding(
        rule="unsharded gradients under accumulation",
        sentence=f"{size_text(size)} are gradients of the whole model: without synchronisation (no_sync) every rank "
        "keeps them unsharded from one micro-batch to the next",
        saves_bytes=share,
        advice="reduce the gradients in every micro-batch, which costs communication, or accumulate less",
        changes={"engine.sync_each_micro_batch": True},
    )


def foreach_temporaries(one: Explanation, _: CellRecord | None) -> Finding | None:
    many = [place for place in _places(one, Category.TEMPORARIES) if place.made_by.startswith("_foreach_")]
    size = sum(place.bytes for place in many)
    if one.phase is not Phase.OPTIMIZER or not one.facts.foreach or not _notable(one, size):
        return None
    return Finding(
        rule="temporaries of the foreach optimizer",
        sentence=f"{size_text(size)} are intermediate results of the optimizer's multi-tensor (foreach) variant, "
        "which takes each operation for all parameters at once",
        saves_bytes=size,
        advice="use the fused variant, a single kernel without intermediate results",
        changes={"optimizer": "adamw"},
    )


def activations_in_fp32(one: Explanation, _: CellRecord | None) -> Finding | None:
    full = [place for place in _places(one, Category.ACTIVATIONS) if place.dtype == "float32"]
    size = sum(place.bytes for place in full)
    if not _notable(one, size) or size < 0.25 * _of(one, Category.ACTIVATIONS):
        return None
    largest = full[0]
    mixed = one.spec.precision not in (Precision.FP32, Precision.TF32)
    where = f"; the largest is {largest.made_by} in {largest.module or 'the model'}" if mixed else ""
    return Finding(
        rule="activations in fp32",
        sentence=f"{size_text(size)} of {size_text(_of(one, Category.ACTIVATIONS))} of activations are kept in "
        f"fp32{where}",
        saves_bytes=size // 2,
        advice="keep the weights, and with them the residual stream, in half precision, or use kernels that do (Liger)"
        if mixed
        else "train in bf16",
        changes=None if mixed else {"precision": "bf16"},
    )


def kv_cache(one: Explanation, _: CellRecord | None) -> Finding | None:
    size = one.facts.kv_cache_bytes
    if size == 0:
        return None
    return Finding(
        rule="KV cache in training",
        sentence=f"the model returns {size_text(size)} of keys and values for generation, which training never reads",
        saves_bytes=_of(one, Category.KV_CACHE),
        advice="set use_cache=False in the model's configuration",
        changes={"model.config.use_cache": False},
    )


def frozen_with_state(one: Explanation, _: CellRecord | None) -> Finding | None:
    size = one.facts.frozen_state_bytes
    if size == 0:
        return None
    return Finding(
        rule="frozen parameters with optimizer state",
        sentence=f"{size_text(size)} are optimizer states of {one.facts.frozen_state_parameters:,} parameters that "
        "are frozen",
        saves_bytes=size,
        advice="give the optimizer only the parameters that require gradients",
    )


def reserved_above_allocated(one: Explanation, record: CellRecord | None) -> Finding | None:
    slack = _of(one, Category.SLACK)
    if one.spec.expandable_segments or slack < 0.1 * one.reserved_bytes:
        return None
    return Finding(
        rule="reserved far above allocated",
        sentence=f"{size_text(slack)} are reserved and hold no tensor at the peak: free memory is in pieces of the "
        "wrong sizes",
        saves_bytes=slack,
        counter=Counter.RESERVED,
        advice="set expandable_segments",
        changes={"expandable_segments": True},
    )


def allocator_retries(one: Explanation, record: CellRecord | None) -> Finding | None:
    rank = record.largest_rank if record else None
    if record is None or rank is None or not (record.status is Status.THRASHING or rank.alloc_retries):
        return None
    spec = one.spec
    smaller = {"batch_size": spec.batch_size // 2} if spec.batch_size > 1 else None
    return Finding(
        rule="allocator retries",
        sentence=f"the allocator gave back its cache and asked again {rank.alloc_retries} times in "
        f"{spec.measured_iterations} iterations: it runs, and much slower than it could",
        saves_bytes=0,
        advice="take a smaller batch, or save memory elsewhere first",
        changes={"expandable_segments": True} if not spec.expandable_segments else smaller,
    )


def activations_not_recomputed(one: Explanation, _: CellRecord | None) -> Finding | None:
    size, asked = _of(one, Category.ACTIVATIONS), one.spec.gradient_checkpointing
    in_effect = one.facts.layer_forwards != 1
    if (asked and in_effect) or not (_notable(one, size) and size > 0.1 * one.allocated_bytes):
        return None
    asked_text = (
        "although gradient checkpointing was asked for: each layer ran once" if asked else "and none recomputed"
    )
    return Finding(
        rule="checkpointing not in effect" if asked else "activations kept",
        sentence=f"{size_text(size)} are activations kept for the backward pass, {asked_text}",
        saves_bytes=size,
        advice="see that the model is in training mode and use_cache is off"
        if asked
        else "recompute them (gradient checkpointing): about a third more time for most of these bytes",
        changes=None if asked else {"gradient_checkpointing": True},
    )


def head_untied(one: Explanation, _: CellRecord | None) -> Finding | None:
    facts, spec = one.facts, one.spec
    head, whole = facts.output_embedding_parameters, spec.model.parameters
    if facts.embeddings_tied is not False or not head or whole is None:
        return None
    states = (Category.PARAMETERS, Category.MASTER_WEIGHTS, Category.OPTIMIZER_STATES, Category.GRADIENTS)
    size = sum(_of(one, category) for category in states) * head // whole
    if size < 0.05 * one.allocated_bytes:
        return None
    return Finding(
        rule="output embedding of its own",
        sentence=f"the output embedding is {head / whole:.0%} of all parameters, and its states are {size_text(size)}",
        saves_bytes=size,
        advice="tie it to the input embedding, if the model is trained from scratch: it is another model then",
        changes={"model.config.tie_word_embeddings": True, "model.parameters": whole - head},
    )


RULES: tuple[Rule, ...] = (
    gathered_weights_held,
    full_logits,
    weight_copies_beside_gradients,
    unsharded_gradients,
    foreach_temporaries,
    activations_in_fp32,
    kv_cache,
    frozen_with_state,
    reserved_above_allocated,
    allocator_retries,
    activations_not_recomputed,
    head_untied,
)
