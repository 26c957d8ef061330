import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from sweep.spec import CellSpec, LoraSpec, SpecError, cell_id, from_json, to_json, unsupported_reason
from sweep.spec.fields import identity_of

MakeSpec = Callable[..., CellSpec]


def test_json_and_back_is_the_same_spec(make_spec: MakeSpec) -> None:
    spec = make_spec(engine={"name": "deepspeed", "zero_stage": 3}, gradient_clipping=None)
    assert from_json(CellSpec, json.loads(json.dumps(to_json(spec)))) == spec


def test_a_spec_is_frozen(make_spec: MakeSpec) -> None:
    with pytest.raises(FrozenInstanceError):
        make_spec().batch_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 0}, "batch_size=0 is not valid: give a whole number of 1 or more."),
        ({"batch_size": 1.5}, "batch_size=1.5 is not valid: give a whole number."),
        ({"batch_size": True}, "batch_size=True is not valid: give a whole number."),
        (
            {"precision": "int3"},
            "precision=int3 is not valid: choose one of fp32, tf32, bf16, fp16, bf16_pure.",
        ),
        ({"engine": {"name": "deepspeed"}}, "engine.zero_stage=null is not valid: choose 0, 1, 2 or 3."),
        ({"engine": {"name": "ddp", "zero_stage": 1}}, "only engine=deepspeed has ZeRO stages"),
        (
            {"engine": {"name": "fsdp2", "zero_init": True}},
            "engine.zero_init=True is not valid: only engine=deepspeed has it",
        ),
        (
            {"engine": {"name": "deepspeed", "zero_stage": 2, "parameter_offload": True}},
            "it needs engine.zero_stage=3.",
        ),
        ({"engine": {"name": "deepspeed", "zero_stage": 3, "reduce_bucket_size": 0}}, "engine.reduce_bucket_size=0"),
        ({"lora": {"rank": 0}}, "lora.rank=0 is not valid: give a whole number of 1 or more."),
        ({"lora": {"rank": 8, "targets": "q_proj"}}, "lora.targets=q_proj is not valid: give a list."),
        (
            {"device": {"kind": "cpu", "memory_limit_bytes": 2**30, "gpu": {"key": "l4"}}},
            "device.gpu=l4 is not valid: device=virtual plays a GPU, and no other device.",
        ),
        ({"attention": "fast"}, "choose one of eager, sdpa, flash."),
        ({"seq_len": 4096}, "model=tiny takes at most 2048 tokens"),
        ({"warmup_iterations": 0}, "so that the optimizer has stepped"),
        ({"nonsense": 1}, "there is no such field; known are accumulation"),
        ({"model": {"name": "x"}}, "is required"),
    ],
)
def test_bad_values_are_refused_by_name(make_spec: MakeSpec, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        make_spec(**changes)
    assert sentence in str(error.value)


def test_a_series_is_what_differs_in_batch_size_alone(make_spec: MakeSpec) -> None:
    spec = make_spec()
    assert replace(spec, batch_size=7).series_id == spec.series_id
    assert replace(spec, accumulation=7).series_id != spec.series_id


def test_the_time_that_a_cell_may_take_is_no_part_of_its_identity(make_spec: MakeSpec) -> None:
    short, derived = make_spec(timeout_seconds=1), make_spec(timeout_seconds=None)
    assert cell_id(short, {}) == cell_id(derived, {})
    assert short.series_id == derived.series_id


def test_the_cell_id_depends_on_the_spec_and_on_the_software(make_spec: MakeSpec) -> None:
    spec = make_spec()
    identifier = cell_id(spec, {"torch": "2.14.1"})
    assert identifier == cell_id(make_spec(), {"torch": "2.14.1"})
    assert identifier != cell_id(replace(spec, batch_size=2), {"torch": "2.14.1"})
    assert identifier != cell_id(spec, {"torch": "2.14.2"})


def test_a_field_of_a_later_version_at_its_default_changes_no_identity(make_spec: MakeSpec) -> None:
    """So that cells stored before it existed keep their names."""
    spec = make_spec()
    added = {"lora", "liger", "attention", "loss", "compile", "checkpoint_reentrant", "checkpoint_every"}
    assert added <= set(to_json(spec))
    assert not added & set(identity_of(spec))
    assert set(identity_of(spec)["engine"]) == {"name", "zero_stage"}
    assert replace(spec, lora=LoraSpec(rank=8)).series_id != spec.series_id


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": {"name": "single"}, "world_size": 2}, "one process on one device"),
        ({"engine": {"name": "device_map"}}, "at least two GPUs; world_size=1"),
        ({"optimizer": "adamw_8bit"}, "kernels that device=virtual cannot run"),
        ({"optimizer": "deepspeed_cpu_adam"}, "needs engine.optimizer_offload=true"),
        (
            {"engine": {"name": "deepspeed", "zero_stage": 0}, "precision": "bf16_pure"},
            "bf16 master weights in ZeRO stages 1, 2 and 3 alone",
        ),
        ({"checkpoint_every": 2}, "without gradient_checkpointing there is nothing"),
    ],
)
def test_a_reason_for_what_cannot_run(make_spec: MakeSpec, changes: dict[str, Any], reason: str) -> None:
    spec = make_spec(**({"device": {"kind": "virtual", "gpu": {"key": "a100-80gb"}}} | changes))
    assert reason in str(unsupported_reason(spec))


def test_devices_that_share_one_model_share_one_batch(make_spec: MakeSpec) -> None:
    spec = make_spec(engine={"name": "device_map"}, batch_size=3, accumulation=4, world_size=2, seq_len=32)
    assert spec.effective_batch_size == 12
    assert spec.tokens_per_iteration == 12 * 32


def test_tokens_count_the_world_and_the_accumulation(make_spec: MakeSpec) -> None:
    spec = make_spec(batch_size=3, accumulation=4, world_size=2, seq_len=32)
    assert spec.effective_batch_size == 24
    assert spec.tokens_per_iteration == 24 * 32


def test_combinations_without_sense_are_known_before_they_run(make_spec: MakeSpec) -> None:
    assert unsupported_reason(make_spec()) is None
    assert "CUDA allocator" in str(unsupported_reason(make_spec(expandable_segments=True)))
    assert "needs a GPU" in str(unsupported_reason(make_spec(precision="fp16")))
