"""Cells on the virtual device, explained: the sums, the moments, and each finding where it applies and where not."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read_model

from sweep import virtual
from sweep.explain import differences, growth, main
from sweep.explain import findings as rules
from sweep.explain.cells import Explained, Subject
from sweep.explain.findings import Finding
from sweep.explain.savings import Verified, verify
from sweep.explanation import Category, Explanation, Request
from sweep.launch import run_cell
from sweep.record import CellRecord, Phase, Status
from sweep.spec import CellSpec, from_json
from sweep.store import Store
from sweep.worker.explain.facts import frozen_states

pytestmark = pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))

Explain = Callable[..., Explained]
ZERO_2: dict[str, Any] = {"engine": {"name": "deepspeed", "zero_stage": 2}, "world_size": 8}
ZERO_3: dict[str, Any] = {"engine": {"name": "deepspeed", "zero_stage": 3}, "world_size": 8}


def spec_of(**changes: Any) -> CellSpec:
    content = {
        "model": read_model("tiny"),
        "engine": {"name": "ddp"},
        "device": {"kind": "virtual", "gpu": {"key": "a100-80gb"}},
        "world_size": 1,
        "batch_size": 2,
        "seq_len": 64,
        "precision": "bf16",
        "warmup_iterations": 2,
        "measured_iterations": 1,
    }
    return from_json(CellSpec, content | changes)


@pytest.fixture(scope="module")
def explain(tmp_path_factory: pytest.TempPathFactory) -> Explain:
    """A tiny cell, explained; each only once."""
    store = Store(tmp_path_factory.mktemp("explained"))

    @functools.cache
    def run(content: str) -> Explained:
        spec = spec_of(**json.loads(content))
        record = run_cell(spec, store, [], explain=Request())
        assert record.status in (Status.OK, Status.THRASHING), (record.reason, record.failure)
        subject = Subject(spec=spec, store=store, identifier=record.cell_id)
        written = json.loads((subject.directory.path / "explain0.json").read_text())
        assert "message" not in written, written
        return Explained(subject=subject, record=record, explanation=from_json(Explanation, written))

    return lambda **changes: run(json.dumps(changes, sort_keys=True))


def check_sums(one: Explanation) -> None:
    allocated = {category: size for category, size in one.categories.items() if category.allocated}
    assert sum(allocated.values()) == one.allocated_bytes == one.cell_allocated_peak_bytes
    places = dict.fromkeys(allocated, 0)
    for place in one.places:
        places[place.category] += place.bytes
    assert places == allocated
    assert one.unattributed_share < 0.02
    assert max(sum(column) for column in zip(*one.timeline.bytes.values(), strict=True)) == one.allocated_bytes


VARIED: list[dict[str, Any]] = [
    {"precision": "fp32"},
    {"precision": "fp32", "optimizer": "sgd", "batch_size": 8},
    {"precision": "bf16", "accumulation": 2},
    {"precision": "bf16", "gradient_checkpointing": True, "batch_size": 16},
    {"precision": "fp16", "batch_size": 8, "seq_len": 256},
    {"precision": "bf16_pure", "expandable_segments": True, "batch_size": 8},
    {"precision": "bf16", "world_size": 8},
    {"precision": "fp32", "world_size": 2, "accumulation": 2, "gradient_checkpointing": True},
    {"engine": {"name": "deepspeed", "zero_stage": 0}, "world_size": 8},
    {"engine": {"name": "deepspeed", "zero_stage": 0}, "world_size": 8, "precision": "fp16", "accumulation": 2},
    {"engine": {"name": "deepspeed", "zero_stage": 1}, "world_size": 8},
    {"engine": {"name": "deepspeed", "zero_stage": 1}, "world_size": 4, "accumulation": 2, "batch_size": 16},
    ZERO_2,
    ZERO_2 | {"accumulation": 2, "gradient_checkpointing": True, "batch_size": 16},
    ZERO_3,
    ZERO_3 | {"gradient_checkpointing": True, "seq_len": 512, "batch_size": 8},
    ZERO_3 | {"accumulation": 2, "precision": "fp32"},
    {"engine": {"name": "fsdp2"}, "world_size": 8, "accumulation": 2},
    {"engine": {"name": "fsdp2"}, "world_size": 8, "gradient_checkpointing": True, "batch_size": 16},
    {"engine": {"name": "device_map"}, "world_size": 2},
    {"liger": True, "loss": "fused", "batch_size": 8},
    {"optimizer": "adamw_foreach"},
    {"model": read_model("bloom-560m"), "precision": "bf16"},
    {"model": read_model("qwen1.5-0.5b"), **ZERO_3},
    {"model": read_model("pythia-1.4b"), "precision": "bf16", "gradient_checkpointing": True, "batch_size": 8},
    {"model": read_model("llama3.2-1b"), **ZERO_2, "seq_len": 1024},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIED)
def test_categories_add_up_to_the_allocators_figure(explain: Explain, changes: dict[str, Any]) -> None:
    check_sums(explain(**changes).explanation)


def test_a_peak_in_a_later_micro_batch_is_taken_apart_to_the_byte(explain: Explain) -> None:
    one = explain(accumulation=2, gradient_checkpointing=True).explanation
    check_sums(one)
    sizes = {category: one.categories.get(category, 0) for category in Category}
    parameters = read_model("tiny")["parameters"]
    assert sizes[Category.PARAMETERS] == pytest.approx(4 * parameters, rel=0.001)
    assert sizes[Category.GRADIENTS] == pytest.approx(4 * parameters, rel=0.001)
    assert sizes[Category.OPTIMIZER_STATES] == pytest.approx(8 * parameters, rel=0.01)
    assert sizes[Category.WORKSPACES] == 2 * (2 * 4096 + 8 * 16) * 1024
    assert [(start.phase, start.micro_batch) for start in one.timeline.phases] == [
        (phase, micro) for micro in (0, 1) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    ]


def test_explaining_changes_no_figure_of_the_cell(explain: Explain, tmp_path: Path) -> None:
    changes = ZERO_3 | {"gradient_checkpointing": True}
    watched = explain(**changes).record
    alone = run_cell(spec_of(**changes), Store(tmp_path), [])
    (first,), (second,) = watched.ranks, alone.ranks
    assert first.peaks == second.peaks
    assert (first.iterations, first.optimizer_steps) == (second.iterations, second.optimizer_steps) == (3, 3)
    assert first.reserved_by_iteration_bytes == second.reserved_by_iteration_bytes


def finding(rule: Callable[..., Finding | None], cell: Explained) -> Finding | None:
    return rule(cell.explanation, cell.record)


CHECKPOINTED = {"gradient_checkpointing": True}
LONG = {"batch_size": 8, "seq_len": 256}
TIED = read_model("tiny")
TIED = TIED | {"config": TIED["config"] | {"tie_word_embeddings": True}, "parameters": TIED["parameters"] - 2**20}
FSDP2: dict[str, Any] = {"engine": {"name": "fsdp2"}, "world_size": 8}
RELEASING: dict[str, Any] = {
    "zero_optimization": {
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }
}
OFF = {"zero_optimization": RELEASING["zero_optimization"] | {"memory_efficient_linear": False}}
HELD: dict[str, Any] = {
    "world_size": 8,
    "engine": ZERO_3["engine"] | {"zero_init": False, "reduce_bucket_size": 1_000_000, "config": OFF},
}
CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (rules.full_logits, LONG, {"seq_len": 8, "batch_size": 1}),
    (rules.weight_copies_beside_gradients, {"accumulation": 2, "seq_len": 8, "batch_size": 1}, {"seq_len": 8}),
    (rules.activations_in_fp32, LONG | {"precision": "fp32"}, LONG | {"precision": "bf16_pure"} | CHECKPOINTED),
    (rules.reserved_above_allocated, LONG | CHECKPOINTED, LONG | CHECKPOINTED | {"expandable_segments": True}),
    (rules.activations_not_recomputed, LONG, LONG | CHECKPOINTED),
    (rules.gathered_weights_held, HELD, HELD | {"engine": HELD["engine"] | {"config": RELEASING}}),
    (rules.unsharded_gradients, FSDP2 | {"accumulation": 2}, FSDP2),
    (rules.foreach_temporaries, {"optimizer": "adamw_foreach", "seq_len": 8}, {"seq_len": 8}),
    (rules.head_untied, {"seq_len": 8}, {"seq_len": 8, "model": TIED}),
]


@pytest.mark.parametrize(("rule", "applies", "does_not"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_applies_here_and_not_there(
    explain: Explain, rule: Callable[..., Finding | None], applies: dict[str, Any], does_not: dict[str, Any]
) -> None:
    found = finding(rule, explain(**applies))
    assert found is not None
    assert found.saves_bytes > 0
    assert finding(rule, explain(**does_not)) is None


def test_a_kv_cache_is_found_where_the_model_returns_one(explain: Explain) -> None:
    model = read_model("tiny")
    cell = explain(model=model | {"config": model["config"] | {"use_cache": True}})
    check_sums(cell.explanation)
    config = model["config"]
    head = config["hidden_size"] // config["num_attention_heads"]
    entries = config["num_hidden_layers"] * config["num_key_value_heads"] * head * 2 * 64
    assert cell.explanation.facts.kv_cache_bytes == (4 + 2) * entries  # autocast leaves the rotated keys in fp32
    assert finding(rules.kv_cache, cell) is not None
    assert finding(rules.kv_cache, explain()) is None


def test_frozen_parameters_with_optimizer_state_are_found(explain: Explain) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert frozen_states(optimizer) == []
    layers[0].weight.requires_grad_(False)
    ((elements, size),) = frozen_states(optimizer)
    assert (elements, size) == (16, 2 * 16 * 4 + 4)  # two moments in fp32, and the step
    cell = explain()
    assert finding(rules.frozen_with_state, cell) is None
    facts = replace(cell.explanation.facts, frozen_state_bytes=size, frozen_state_parameters=elements)
    assert finding(rules.frozen_with_state, replace(cell, explanation=replace(cell.explanation, facts=facts)))


def test_retries_are_a_finding(explain: Explain) -> None:
    cell = explain()
    assert finding(rules.allocator_retries, cell) is None
    (rank,) = cell.record.ranks
    thrashing = replace(cell.record, status=Status.THRASHING, ranks=(replace(rank, alloc_retries=2),))
    found = rules.allocator_retries(cell.explanation, thrashing)
    assert found is not None
    assert found.changes == {"expandable_segments": True}


def test_checkpointing_that_is_not_in_effect_is_a_finding(explain: Explain) -> None:
    cell = explain(**LONG)
    asked = replace(cell.explanation, spec=replace(cell.explanation.spec, gradient_checkpointing=True))
    assert asked.facts.layer_forwards == 1
    found = rules.activations_not_recomputed(asked, cell.record)
    assert found is not None
    assert found.rule == "checkpointing not in effect"
    assert finding(rules.activations_not_recomputed, explain(**LONG, gradient_checkpointing=True)) is None


def test_what_a_finding_saves_is_what_the_changed_cell_saves(explain: Explain) -> None:
    cell = explain(**LONG)
    found = rules.activations_not_recomputed(cell.explanation, cell.record)
    assert found is not None
    checked = verify(found, cell)
    assert isinstance(checked, Verified)
    assert checked.saved_bytes is not None
    assert 0.5 * found.saves_bytes < checked.saved_bytes <= found.saves_bytes


def test_a_difference_is_made_of_its_categories(explain: Explain) -> None:
    tiny = {"seq_len": 8, "batch_size": 1, "gradient_checkpointing": True, "optimizer": "sgd"}
    before, after = (explain(**tiny, accumulation=n).explanation for n in (1, 2))
    parts = differences.by_category(before, after)
    assert sum(parts.values()) == after.allocated_bytes - before.allocated_bytes > 0
    assert max(parts, key=lambda category: parts[category]) is Category.WEIGHT_COPIES
    assert "weight copies" in differences.sentence(before, after)
    assert any("beside" in note for note in differences.notes(before, after))
    assert differences.differing_fields(before, after) == ["accumulation 1 -> 2"]


def test_activations_grow_with_the_batch_and_states_do_not(explain: Explain) -> None:
    series = [explain(batch_size=size, seq_len=256).explanation for size in (4, 8, 16)]
    lines = {line.category: line for line in growth.growth(series)}
    activations, parameters = lines[Category.ACTIVATIONS], lines[Category.PARAMETERS]
    per_sample = series[1].categories[Category.ACTIVATIONS] / 8
    assert activations.per_sample_bytes == pytest.approx(per_sample, rel=0.05)
    assert activations.per_token_bytes(256) == activations.per_sample_bytes / 256
    assert parameters.per_sample_bytes == pytest.approx(0)
    assert parameters.constant_bytes == series[0].categories[Category.PARAMETERS]
    text = growth.sentences(series)
    assert any(line.startswith("activations: ") for line in text)
    assert any(line.startswith("constant: ") and "parameters" in line for line in text)


def test_the_command_explains_and_compares_and_keeps_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = ["model=tiny", "engine=ddp", "world_size=1", "batch_size=1", "seq_len=8", "accumulation=1,2"]
    assert main([*cells, "--no-verify"]) == 0
    shown = capsys.readouterr().out
    assert "time is not measured" in shown
    assert "of which" in shown
    assert len(list(tmp_path.glob("plots/tiny-virtual/explain/*.png"))) == 3
    (first, *_) = sorted(path.parent.name for path in tmp_path.glob("results/tiny-virtual/cells/*/record.json"))
    written = tmp_path / "results/tiny-virtual/cells" / first / "explain0.json"
    before = written.stat().st_mtime_ns
    assert main([first[:6], "--no-verify"]) == 0
    assert written.stat().st_mtime_ns == before
    assert main([first, "--no-verify", "--snapshot"]) == 0
    assert (written.parent / "snapshot0.pickle").exists()
    assert not list(tmp_path.glob("results/tiny-virtual/.explaining*"))
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["0123456789abcdef"], "is no cell of results/"),
        (["model=tiny", "device=cpu", "batch_size=1"], "device=cpu has no allocator"),
        (["model=tiny", "engine=ddp", "world_size=0", "batch_size=1"], "world_size=0 is not valid"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_cell_that_runs_out_of_memory_is_explained_with_room_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["model=tiny", "engine=ddp", "world_size=1", "gpu.total_memory_bytes=2147483648", "seq_len=512"]
    assert main([*small, "batch_size=512", "--no-verify"]) == 0
    assert "runs out of memory" in capsys.readouterr().out
    (record,) = tmp_path.glob("results/tiny-virtual/cells/*/record.json")
    assert from_json(CellRecord, json.loads(record.read_text())).status is Status.OOM


@pytest.mark.slow
def test_weights_that_zero_3_gathered_and_linear_layers_saved(explain: Explain) -> None:
    engine = ZERO_3["engine"] | {
        "zero_init": False,
        "config": {"zero_optimization": {"memory_efficient_linear": False}},
    }
    model = {"model": read_model("llama3-8b"), "seq_len": 2048, "batch_size": 1, "world_size": 8}
    cell = explain(**model, engine=engine)
    check_sums(cell.explanation)
    found = finding(rules.gathered_weights_held, cell)
    assert found is not None
    assert 11 * 2**30 < found.saves_bytes < 13 * 2**30
    checked = verify(found, cell)
    assert checked is not None
    assert checked.saved_bytes == pytest.approx(found.saves_bytes, rel=0.02)


@pytest.mark.slow
def test_why_accumulation_costs_memory_under_autocast(explain: Explain) -> None:
    cells = {"model": read_model("pythia-1.4b"), "seq_len": 8, "batch_size": 1, "optimizer": "sgd", **CHECKPOINTED}
    before, after = (explain(**cells, accumulation=n).explanation for n in (1, 2))
    parts = differences.by_category(before, after)
    assert parts[Category.WEIGHT_COPIES] > 0.95 * (after.allocated_bytes - before.allocated_bytes) > 0
    assert finding(rules.weight_copies_beside_gradients, explain(**cells, accumulation=2)) is not None


@pytest.mark.slow
def test_why_accumulation_costs_memory_under_fsdp2(explain: Explain) -> None:
    cells = {"model": read_model("llama3-8b"), "seq_len": 2048, "batch_size": 1, **FSDP2, **CHECKPOINTED}
    before, after = (explain(**cells, accumulation=n).explanation for n in (1, 2))
    whole = 2 * read_model("llama3-8b")["parameters"]
    assert differences.by_category(before, after)[Category.UNSHARDED_GRADIENTS] == pytest.approx(whole, rel=0.01)
    found = finding(rules.unsharded_gradients, explain(**cells, accumulation=2))
    assert found is not None
    checked = verify(found, explain(**cells, accumulation=2))
    assert checked is not None
    assert (checked.saved_bytes or 0) > 10 * 2**30
