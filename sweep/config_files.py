"""A user's own `ds_config.json` or accelerate YAML in place of an engine's options.

Its content becomes part of the cell, so that the cell is the same wherever the file lies. What the sweep owns is filled
in: a file may leave it out, say "auto", or say the same; anything else is refused by name, and so is a key that neither
library knows.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sweep.spec import EngineName, SpecError

AUTO = "auto"
KNOWN: Mapping[str, Sequence[str]] = yaml.safe_load(
    Path(__file__).with_name("config_fields.yaml").read_text(encoding="utf-8")
)
"""The fields that each kind of file may have."""
DISTRIBUTED = {
    "NO": (EngineName.SINGLE, EngineName.DEVICE_MAP, EngineName.DDP),
    "MULTI_GPU": (EngineName.DDP,),
    "MULTI_CPU": (EngineName.DDP,),
    "DEEPSPEED": (EngineName.DEEPSPEED,),
    "FSDP": (EngineName.FSDP2,),
}
SECTIONS = {"deepspeed_config": EngineName.DEEPSPEED, "fsdp_config": EngineName.FSDP2}
NOT_RUN: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "compute_environment": (("LOCAL_MACHINE",), "the sweep starts processes on this machine alone"),
    "gpu_ids": (("all",), "the sweep takes the first GPUs that are visible; choose them with CUDA_VISIBLE_DEVICES"),
    "debug": ((False,), "the sweep does not check collectives while it measures"),
    "enable_cpu_affinity": ((False,), "the sweep binds no process to a processor"),
    "downcast_bf16": ((False, "no"), "it is for TPUs"),
    "tpu_use_cluster": ((False,), "it is for TPUs"),
    "tpu_use_sudo": ((False,), "it is for TPUs"),
    "tpu_env": (([],), "it is for TPUs"),
    "tpu_name": ((), "it is for TPUs"),
    "tpu_zone": ((), "it is for TPUs"),
}
"""Fields of an accelerate file with the values that change nothing, and why no other is run. All further fields say how
several machines find each other, which one machine need not, or what is saved (`zero3_save_16bit_model`,
`fsdp_state_dict_type`) and how weights come to the devices (`fsdp_cpu_ram_efficient_loading`): not how one trains."""
Values = Mapping[str, Any]
"""Of the composed configuration: batch_size, accumulation, precision, gradient_clipping and so on."""


def with_file(engine: Values, values: Values) -> dict[str, Any]:
    """The engine's options, with what its `config_file` says in their place. Raises `SpecError`."""
    options = dict(engine)
    name = options.pop("config_file", None)
    if name is None:
        return options
    path = Path(str(name)).expanduser()
    content = _read(path)
    if path.suffix in (".yaml", ".yml"):
        return _from_accelerate(content, options, values, path.parent)
    if options.get("name") != EngineName.DEEPSPEED.value:
        raise SpecError("engine.config_file", name, "a DeepSpeed file needs engine=deepspeed")
    return options | _from_deepspeed(content, values)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else json.loads(text)
    except OSError as error:
        raise SpecError("engine.config_file", path, f"it cannot be read ({error.strerror})") from error
    except (ValueError, yaml.YAMLError) as error:
        raise SpecError("engine.config_file", path, f"it cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise SpecError("engine.config_file", path, "it must hold a mapping")
    return content


def _refuse_unknown(content: Iterable[str], known: Iterable[str], where: str = "") -> None:
    for key in content:
        if key not in known:
            raise SpecError(
                "engine.config_file", where + key, f"there is no such field; known are {', '.join(sorted(known))}"
            )


def _owned(field: str, said: Any, owned: Any, by: str) -> None:
    """A file may leave out what the sweep sets, say "auto", or say the same."""
    if said is not None and said != AUTO and said != owned:
        raise SpecError(
            field, said, f'the sweep sets it to {owned} ({by}); write "auto" in engine.config_file or leave it out'
        )


def _section(content: Values, key: str) -> dict[str, Any]:
    """A copy; empty where the file has no such section."""
    section = content.get(key)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise SpecError(key, section, "it must hold a mapping")
    return dict(section)


def _from_deepspeed(content: dict[str, Any], values: Values) -> dict[str, Any]:
    """`zero_stage`, and as `config` what the sweep does not own."""
    _refuse_unknown(content, KNOWN["deepspeed"])
    rest = dict(content)
    batch, passes, world = values["batch_size"], values["accumulation"], values["world_size"]
    _owned("train_micro_batch_size_per_gpu", rest.pop("train_micro_batch_size_per_gpu", None), batch, "batch_size")
    _owned("gradient_accumulation_steps", rest.pop("gradient_accumulation_steps", None), passes, "accumulation")
    overall = batch * passes * world if isinstance(batch, int) else None
    _owned("train_batch_size", rest.pop("train_batch_size", None), overall, "batch_size x accumulation x world_size")
    _owned("gradient_clipping", rest.pop("gradient_clipping", None), values["gradient_clipping"], "gradient_clipping")
    for half in ("bf16", "fp16"):
        wanted = values["precision"] in ((half, "bf16_pure") if half == "bf16" else (half,))
        section = _section(rest, half)
        rest.pop(half, None)
        _owned(f"{half}.enabled", section.pop("enabled", None), wanted, f"precision={values['precision']}")
        if wanted and section:  # such as how the loss is scaled
            rest[half] = section
    for key, by in (("optimizer", f"optimizer={values['optimizer']}"), ("scheduler", "a constant learning rate")):
        if key in rest:
            raise SpecError(key, "...", f"the sweep makes it ({by}); remove it from engine.config_file")
    zero = _section(rest, "zero_optimization")
    rest.pop("zero_optimization", None)
    _refuse_unknown(zero, KNOWN["zero_optimization"], "zero_optimization.")
    stage = zero.pop("stage", 0)
    zero = {key: _automatic(key, value, values) for key, value in zero.items()}
    for key, value in rest.items():
        if value == AUTO:
            raise SpecError(key, AUTO, "only a Trainer knows what it stands for; give it a value or leave it out")
    return {"zero_stage": stage, "config": rest | ({"zero_optimization": zero} if zero else {})}


def _automatic(key: str, value: Any, values: Values) -> Any:
    """What "auto" stands for in transformers' `integrations/deepspeed.py`: sizes by the model's hidden size."""
    if value != AUTO:
        return value
    hidden = values["model"]["config"].get("hidden_size")
    sizes = {
        "reduce_bucket_size": 1.0,
        "stage3_prefetch_bucket_size": 0.9,
    }
    if hidden is not None and key in sizes:
        return int(sizes[key] * hidden * hidden)
    if hidden is not None and key == "stage3_param_persistence_threshold":
        return 10 * hidden
    raise SpecError(f"zero_optimization.{key}", AUTO, "only a Trainer knows what it stands for; give it a value")


def _from_accelerate(content: dict[str, Any], options: Values, values: Values, folder: Path) -> dict[str, Any]:
    _refuse_unknown(content, KNOWN["accelerate"])
    name = options["name"]
    distributed = str(content.get("distributed_type", "NO"))
    engines = DISTRIBUTED.get(distributed, ())
    if name not in engines:
        fitting = " or ".join(f"engine={one.value}" for one in engines) or f"one of {', '.join(DISTRIBUTED)}"
        raise SpecError("distributed_type", distributed, f"the sweep runs engine={name}; choose {fitting}")
    mixed = values["precision"] if values["precision"] in ("bf16", "fp16") else "no"
    _owned("mixed_precision", content.get("mixed_precision"), mixed, f"precision={values['precision']}")
    _owned("num_processes", content.get("num_processes"), values["world_size"], "world_size")
    _owned("num_machines", content.get("num_machines"), 1, "one machine")
    _owned("use_cpu", content.get("use_cpu"), values["device"]["kind"] == "cpu", f"device={values['device']['kind']}")
    for key, (harmless, why) in NOT_RUN.items():
        if content.get(key) is not None and content[key] not in harmless:
            raise SpecError(key, content[key], f"{why}; leave it out of engine.config_file")
    for key, engine in SECTIONS.items():
        if content.get(key) and name != engine.value:
            raise SpecError(key, "...", f"engine={name} has no use for it; remove it from engine.config_file")
    if name == EngineName.DEEPSPEED.value:
        return dict(options) | _deepspeed_section(_section(content, "deepspeed_config"), values, folder)
    if name == EngineName.FSDP2.value:
        return dict(options) | _fsdp_section(_section(content, "fsdp_config"), values)
    return dict(options)


def _deepspeed_section(section: dict[str, Any], values: Values, folder: Path) -> dict[str, Any]:
    _refuse_unknown(section, KNOWN["accelerate_deepspeed"], "deepspeed_config.")
    if "deepspeed_config_file" in section:
        return _from_deepspeed(_read(folder / str(section["deepspeed_config_file"])), values)
    _owned(
        "gradient_accumulation_steps",
        section.get("gradient_accumulation_steps"),
        values["accumulation"],
        "accumulation",
    )
    _owned("gradient_clipping", section.get("gradient_clipping"), values["gradient_clipping"], "gradient_clipping")
    stage = section.get("zero_stage", 2)
    for key in ("offload_optimizer_device", "offload_param_device"):
        if section.get(key, "none") not in ("none", "cpu"):
            raise SpecError(key, section[key], "choose none or cpu")
    return {
        "zero_stage": stage,
        "zero_init": bool(section.get("zero3_init_flag", False)) if stage == 3 else None,
        "optimizer_offload": True if section.get("offload_optimizer_device", "none") == "cpu" else None,
        "parameter_offload": True if section.get("offload_param_device", "none") == "cpu" else None,
    }


def _fsdp_section(section: dict[str, Any], values: Values) -> dict[str, Any]:
    _refuse_unknown(section, KNOWN["accelerate_fsdp"], "fsdp_config.")
    if section.get("fsdp_version", 1) != 2:
        raise SpecError("fsdp_version", section.get("fsdp_version", 1), "the sweep runs FSDP2; write fsdp_version: 2")
    policy = section.get("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    _owned("fsdp_auto_wrap_policy", policy, "TRANSFORMER_BASED_WRAP", "each transformer layer is a unit")
    checkpointing = section.get("fsdp_activation_checkpointing")
    _owned("fsdp_activation_checkpointing", checkpointing, values["gradient_checkpointing"], "gradient_checkpointing")
    return {
        "reshard_after_forward": section.get("fsdp_reshard_after_forward"),
        "cpu_offload": section.get("fsdp_offload_params") or None,
        "wrap_layers": section.get("fsdp_transformer_layer_cls_to_wrap"),
    }
