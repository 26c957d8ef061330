"""The `ds_config.json` of a cell. https://www.deepspeed.ai/docs/config-json/ describes its fields."""

from collections.abc import Mapping
from typing import Any

from sweep.spec.cell import CellSpec, DeviceKind, Precision

CPU_BUCKET = 1_000_000
"""Elements. DeepSpeed's default buckets of 500 million are 2 GB each: more than a rank of the CPU device may have."""


def deepspeed_config(spec: CellSpec) -> dict[str, Any]:
    """What the sweep owns, and of the rest what was chosen: all else is DeepSpeed's default."""
    engine = spec.engine
    config: dict[str, Any] = dict(engine.config or {})
    zero: dict[str, Any] = dict(config.get("zero_optimization", {})) | {"stage": engine.zero_stage}
    if spec.device.kind is DeviceKind.CPU:
        zero |= {"reduce_bucket_size": CPU_BUCKET, "allgather_bucket_size": CPU_BUCKET}
    if engine.optimizer_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False  # otherwise DeepSpeed takes its own CPUAdam alone
    if engine.parameter_offload:
        zero["offload_param"] = {"device": "cpu"}
    if engine.memory_efficient_linear is not None:
        zero["memory_efficient_linear"] = engine.memory_efficient_linear
    if engine.reduce_bucket_size is not None:
        zero["reduce_bucket_size"] = engine.reduce_bucket_size
    if engine.prefetch_bucket_size is not None:
        zero["stage3_prefetch_bucket_size"] = engine.prefetch_bucket_size
    # The client's torch optimizer has the footprint of DeepSpeed's own FusedAdam and needs no CUDA compiler.
    config |= {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    config |= {"train_micro_batch_size_per_gpu": spec.batch_size, "gradient_accumulation_steps": spec.accumulation}
    for name, owned in _precision(spec.precision).items():
        config[name] = {**config.get(name, {}), **owned}
    if spec.gradient_clipping is not None:
        config["gradient_clipping"] = spec.gradient_clipping
    return config


def _precision(precision: Precision) -> Mapping[str, Mapping[str, Any]]:
    if precision is Precision.BF16_PURE:
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    return {precision.value: {"enabled": True}} if precision in (Precision.BF16, Precision.FP16) else {}
