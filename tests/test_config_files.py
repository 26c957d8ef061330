"""A user's own DeepSpeed or accelerate file: what it says is run, what contradicts the sweep is refused by name."""

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import read_model

from sweep.config_files import KNOWN, with_file
from sweep.spec import CellSpec, SpecError
from sweep.spec.deepspeed import deepspeed_config

MakeSpec = Callable[..., CellSpec]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
VALUES = {
    "model": read_model("tiny"),
    "batch_size": 2,
    "accumulation": 4,
    "world_size": 8,
    "precision": "bf16",
    "gradient_clipping": 1.0,
    "gradient_checkpointing": False,
    "optimizer": "adamw",
    "device": {"kind": "virtual"},
}


def engine_with(folder: Path, content: Mapping[str, Any], name: str = "deepspeed", **engine: Any) -> dict[str, Any]:
    path = folder / ("ds.json" if name == "deepspeed" and "distributed_type" not in content else "accelerate.yaml")
    path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content))
    return with_file({"name": name, **engine, "config_file": str(path)}, VALUES)


def test_what_the_sweep_owns_is_filled_in_and_the_rest_is_the_files(make_spec: MakeSpec, tmp_path: Path) -> None:
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "train_batch_size": 64,
        "bf16": {"enabled": "auto", "check_grad_overflow": True},
        "fp16": {"enabled": False, "initial_scale_power": 16},
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": "auto"},
    }
    engine = engine_with(tmp_path, content, zero_stage=3)
    spec = make_spec(engine=engine, batch_size=2, accumulation=4, world_size=8, precision="bf16")
    config = deepspeed_config(spec)
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert "fp16" not in config
    assert config["wall_clock_breakdown"] is False
    assert config["zero_optimization"]["stage"] == 2
    assert config["zero_optimization"]["overlap_comm"] is False
    again = engine_with(tmp_path, dict(reversed(content.items())), zero_stage=3)
    assert make_spec(engine=again).series_id == make_spec(engine=engine).series_id, "identity is by content"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"train_micro_batch_size_per_gpu": 16},
            'train_micro_batch_size_per_gpu=16 is not valid: the sweep sets it to 2 (batch_size); write "auto"',
        ),
        ({"train_batch_size": 32}, "the sweep sets it to 64 (batch_size x accumulation x world_size)"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=True is not valid: the sweep sets it to False (precision=bf16)"),
        ({"bf16": True}, "bf16=True is not valid: it must hold a mapping."),
        ({"gradient_clipping": 0.5}, "gradient_clipping=0.5 is not valid: the sweep sets it to 1.0"),
        ({"optimizer": {"type": "AdamW"}}, "the sweep makes it (optimizer=adamw)"),
        ({"zero_optimisation": {}}, "engine.config_file=zero_optimisation is not valid: there is no such field"),
        ({"zero_optimization": {"stages": 2}}, "zero_optimization.stages is not valid: there is no such field"),
        ({"distributed_type": "FSDP"}, "distributed_type=FSDP is not valid: the sweep runs engine=deepspeed"),
        ({"distributed_type": "DEEPSPEED", "num_processes": 4}, "num_processes=4 is not valid: the sweep sets it to 8"),
        ({"distributed_type": "DEEPSPEED", "use_cpu": True}, "the sweep sets it to False (device=virtual)"),
        ({"distributed_type": "DEEPSPEED", "gpu_ids": "2,3"}, "gpu_ids=2,3 is not valid: the sweep takes the first"),
        ({"distributed_type": "DEEPSPEED", "fsdp_config": {"fsdp_version": 2}}, "engine=deepspeed has no use for it"),
    ],
)
def test_a_conflict_is_one_sentence(tmp_path: Path, content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        engine_with(tmp_path, content)
    assert sentence in str(error.value)


def test_an_accelerate_file_sets_the_engines_options(tmp_path: Path) -> None:
    section: dict[str, Any] = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True}
    section |= {"fsdp_transformer_layer_cls_to_wrap": "LlamaMLP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    content = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": section}
    found = engine_with(tmp_path, content, "fsdp2")
    assert found == {"name": "fsdp2", "reshard_after_forward": False, "cpu_offload": True, "wrap_layers": "LlamaMLP"}
    content = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": False}}
    found = engine_with(tmp_path, content)
    assert (found["zero_stage"], found["zero_init"]) == (3, False)


def test_the_known_fields_are_deepspeeds() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config", reason="deepspeed is not installed")
    fields = config.DeepSpeedZeroConfig.model_fields
    assert {field.alias or name for name, field in fields.items()} >= set(KNOWN["zero_optimization"])


def test_a_wrong_file_ends_in_one_sentence(run_sweep: Run, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 16}))
    arguments = ["model=tiny", "device=cpu", "engine=deepspeed", "batch_size=2", "engine.config_file=ds.json"]
    done = run_sweep(*arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "train_micro_batch_size_per_gpu=16 is not valid: the sweep sets it to 2" in done.stdout + done.stderr
