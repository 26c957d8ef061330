"""A configuration as files and commands for the libraries that train with it.

accelerate   YAML for `accelerate launch --config_file`
deepspeed    `ds_config.json` for `deepspeed.initialize`
trainer      JSON of keyword arguments for `transformers.TrainingArguments`
command      a launch command with its environment, for a script that parses `TrainingArguments`
"""

import json
import shlex
from enum import Enum
from typing import Any

import yaml

from sweep.spec import CellSpec, DeviceKind, EngineName, Loss, Optimizer, Precision
from sweep.spec.deepspeed import deepspeed_config

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
MIXED = (Precision.BF16, Precision.FP16)


OPTIM = {
    Optimizer.ADAMW: "adamw_torch_fused",
    Optimizer.ADAMW_FOREACH: "adamw_torch",
    Optimizer.ADAMW_SINGLE: "adamw_torch",
    Optimizer.SGD: "sgd",
    Optimizer.ADAFACTOR: "adafactor",
    Optimizer.ADAMW_8BIT: "adamw_bnb_8bit",
    Optimizer.DEEPSPEED_FUSED_ADAM: "adamw_torch_fused",
    Optimizer.DEEPSPEED_CPU_ADAM: "adamw_torch_fused",
}
"""`TrainingArguments.optim`, by the optimizer that was measured."""


class Target(str, Enum):
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    TRAINER = "trainer"
    COMMAND = "command"

    @property
    def file_name(self) -> str:
        return {
            Target.ACCELERATE: "accelerate.yaml",
            Target.DEEPSPEED: "ds_config.json",
            Target.TRAINER: "training_arguments.json",
            Target.COMMAND: "launch.sh",
        }[self]


class EmitError(ValueError):
    """This configuration cannot be said to that library; one sentence."""


def emit(spec: CellSpec, target: Target) -> str:
    """The text of the file. Raises `EmitError`."""
    if target is Target.ACCELERATE:
        return accelerate_yaml(spec)
    if target is Target.DEEPSPEED:
        if spec.engine.name is not EngineName.DEEPSPEED:
            raise EmitError("--emit deepspeed: the winner runs without DeepSpeed; choose --emit accelerate")
        return json.dumps(deepspeed_file(spec), indent=2) + "\n"
    if target is Target.TRAINER:
        return json.dumps(training_arguments(spec), indent=2) + "\n"
    return launch_script(spec)


def environment(spec: CellSpec) -> dict[str, str]:
    """What must be set before Python starts."""
    if spec.device.kind is DeviceKind.CPU:
        return {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return {ALLOCATOR_VARIABLE: "expandable_segments:True"} if spec.expandable_segments else {}


def deepspeed_file(spec: CellSpec) -> dict[str, Any]:
    """As it was measured: the optimizer is the script's own, from torch."""
    return {"train_batch_size": spec.effective_batch_size, **deepspeed_config(spec)}


def accelerate_yaml(spec: CellSpec) -> str:
    on_cpu, several = spec.device.kind is DeviceKind.CPU, spec.world_size > 1
    if spec.engine.name is EngineName.DEVICE_MAP:
        raise EmitError('--emit accelerate: a device map is the script\'s own; load with device_map="balanced"')
    engine = spec.engine
    unsaid = {
        "engine.config_file": engine.config,
        "engine.memory_efficient_linear": engine.memory_efficient_linear,
        "engine.reduce_bucket_size": engine.reduce_bucket_size,
        "engine.prefetch_bucket_size": engine.prefetch_bucket_size,
    }
    if named := [name for name, value in unsaid.items() if value is not None]:
        raise EmitError(f"--emit accelerate: its file has no place for {named[0]}; choose --emit deepspeed")
    deepspeed, fsdp = spec.engine.name is EngineName.DEEPSPEED, spec.engine.name is EngineName.FSDP2
    plain = ("MULTI_CPU" if on_cpu else "MULTI_GPU") if several else "NO"
    distributed = "DEEPSPEED" if deepspeed else "FSDP" if fsdp else plain
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": distributed,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": spec.precision.value if spec.precision in MIXED else "no",
        "num_machines": 1,
        "num_processes": spec.world_size,
        "use_cpu": on_cpu,
    }
    if deepspeed:
        content["deepspeed_config"] = {
            "gradient_accumulation_steps": spec.accumulation,
            "zero_stage": spec.engine.zero_stage,
            "zero3_init_flag": spec.engine.builds_sharded,
            "offload_optimizer_device": "cpu" if spec.engine.optimizer_offload else "none",
            "offload_param_device": "cpu" if spec.engine.parameter_offload else "none",
        }
        if spec.gradient_clipping is not None:
            content["deepspeed_config"]["gradient_clipping"] = spec.gradient_clipping
    if fsdp:
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": spec.engine.reshard_after_forward is not False,
            "fsdp_offload_params": bool(spec.engine.cpu_offload),
        }
        if spec.engine.wrap_layers:
            content["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = spec.engine.wrap_layers
    by_hand = [
        f"the data loader's batch size: {spec.batch_size}",
        f"Accelerator(gradient_accumulation_steps={spec.accumulation})",
        f"gradient checkpointing: {'model.gradient_checkpointing_enable()' if spec.gradient_checkpointing else 'off'}",
        f"optimizer: {spec.optimizer.value}",
    ]
    if engine.sync_each_micro_batch:
        by_hand.append("accelerate.utils.GradientAccumulationPlugin(sync_each_batch=True)")
    by_hand += _by_hand(spec)
    if spec.precision is Precision.TF32:
        by_hand.append('torch.set_float32_matmul_precision("high")')
    by_hand += [f"environment: {name}={value}" for name, value in environment(spec).items()]
    notes = "\n".join(f"#   {line}" for line in by_hand)
    return (
        f"# accelerate launch --config_file THIS train.py\n# What only the script can set:\n{notes}\n"
        + yaml.safe_dump(content, sort_keys=False)
    )


def _by_hand(spec: CellSpec) -> list[str]:
    """What is done to the model before an engine gets it: no file says that."""
    lines = []
    if spec.lora:
        lines.append(f"peft.LoraConfig(r={spec.lora.rank}, target_modules={list(spec.lora.targets) or 'all-linear'!r})")
    if spec.attention:
        lines.append(f"attention: {spec.attention.value}")
    lines += [f"{name}: on" for name, on in (("Liger's kernels", spec.liger), ("torch.compile", spec.compile)) if on]
    if spec.loss is Loss.FUSED:
        lines.append("Liger's fused linear cross-entropy: on")
    if spec.precision is Precision.BF16_PURE:
        lines.append("the model is loaded with dtype=torch.bfloat16")
    if spec.gradient_checkpointing and spec.checkpoint_every > 1:
        lines.append(f"gradient checkpointing: of every {spec.checkpoint_every} layers the first alone")
    return lines


def training_arguments(spec: CellSpec) -> dict[str, Any]:
    """Keyword arguments of `TrainingArguments`; `output_dir` and the length of training are the user's."""
    if spec.engine.name in (EngineName.FSDP2, EngineName.DEVICE_MAP):
        raise EmitError(
            f"--emit: TrainingArguments do not say engine={spec.engine.name.value}; choose --emit accelerate"
        )
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": spec.batch_size,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_checkpointing": spec.gradient_checkpointing,
        "optim": OPTIM[spec.optimizer],
        "max_grad_norm": spec.gradient_clipping or 0.0,
        "bf16": spec.precision is Precision.BF16,
        "fp16": spec.precision is Precision.FP16,
    }
    if spec.gradient_checkpointing:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": spec.checkpoint_reentrant}
    if spec.precision is Precision.TF32:
        arguments["tf32"] = True
    if spec.device.kind is DeviceKind.CPU:
        arguments["use_cpu"] = True
    if spec.engine.name is EngineName.DEEPSPEED:
        arguments["deepspeed"] = deepspeed_file(spec)
    return arguments


def launch_script(spec: CellSpec) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment(spec).items()]
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={spec.world_size}"]
    options = []
    for name, value in training_arguments(spec).items():
        if value is False:
            continue
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        options.append(f"--{name}={shlex.quote(text)}" if value is not True else f"--{name}=True")
    lines = [" ".join([*variables, *launcher, '"${SCRIPT:-train.py}"']), *options, '"$@"']
    by_hand = "".join(f"#   {line}\n" for line in _by_hand(spec))
    note = f"# What only the script can set:\n{by_hand}" if by_hand else ""
    return (
        f"#!/bin/sh\n# SCRIPT parses transformers.TrainingArguments; further arguments are passed on to it.\n{note}"
        + (" \\\n  ".join(lines) + "\n")
    )
