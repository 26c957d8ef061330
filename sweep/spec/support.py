"""Which combinations make no sense, or cannot run here: known before anything is spawned."""

import importlib.util
from collections.abc import Callable

from sweep.spec.cell import CellSpec, DeviceKind, Optimizer, Precision
from sweep.spec.engine import EngineName
from sweep.spec.model import Weights
from sweep.spec.savers import Attention, Loss

DEEPSPEED_OWN = (Optimizer.DEEPSPEED_FUSED_ADAM, Optimizer.DEEPSPEED_CPU_ADAM)


def unsupported_reason(spec: CellSpec) -> str | None:
    """Why this combination cannot be run, or None."""
    checks: tuple[Callable[[CellSpec], str | None], ...] = (_device, _world, _precision, _optimizer, _savers, _model)
    return next((reason for check in checks if (reason := check(spec)) is not None), None)


def _device(spec: CellSpec) -> str | None:
    if spec.device.kind is not DeviceKind.CPU:
        return None
    if spec.expandable_segments:
        return "expandable segments are a feature of the CUDA allocator; the CPU device has none"
    if spec.precision in (Precision.TF32, Precision.FP16):
        return f"{spec.precision.value} needs a GPU"
    if spec.engine.name is EngineName.DEVICE_MAP:
        return "engine=device_map spreads layers over GPUs; the CPU device is one memory"
    if spec.engine.cpu_offload or spec.engine.optimizer_offload or spec.engine.parameter_offload:
        return "offloading moves states from the GPU to the host; on the CPU device they are there already"
    if spec.liger or spec.loss is Loss.FUSED:
        return "Liger's kernels need a GPU"
    if spec.attention is Attention.FLASH:
        return "attention=flash needs a GPU"
    return None


def _world(spec: CellSpec) -> str | None:
    name = spec.engine.name
    if name is EngineName.SINGLE and spec.world_size > 1:
        return f"engine=single is one process on one device; world_size={spec.world_size} needs another engine"
    if name is EngineName.DEVICE_MAP and spec.world_size < 2:
        return "engine=device_map spreads a model over at least two GPUs; world_size=1 is what engine=single does"
    return None


def _precision(spec: CellSpec) -> str | None:
    if spec.engine.name is EngineName.DEEPSPEED and spec.precision is Precision.BF16_PURE:
        if spec.engine.zero_stage == 0:
            return "DeepSpeed has bf16 master weights in ZeRO stages 1, 2 and 3 alone; in stage 0 choose precision=bf16"
        if spec.engine.optimizer_offload:
            return "DeepSpeed keeps optimizer states in bf16 on the GPU alone; leave engine.optimizer_offload null"
    return None


def _model(spec: CellSpec) -> str | None:
    if spec.model.weights is Weights.PRETRAINED and spec.engine.builds_sharded:
        return "pretrained weights are not loaded under zero.Init; choose engine.zero_init=false"
    on_gpu = spec.device.kind is not DeviceKind.CPU
    made_late = spec.engine.name is EngineName.DEVICE_MAP or (spec.engine.name is EngineName.FSDP2 and on_gpu)
    if spec.model.weights is Weights.PRETRAINED and made_late:
        name = spec.engine.name.value
        return f"engine={name} makes parameters where they will lie, with random values; choose model.weights=random"
    return None


def _optimizer(spec: CellSpec) -> str | None:
    offload = bool(spec.engine.optimizer_offload or spec.engine.cpu_offload)
    if spec.optimizer is Optimizer.ADAMW_8BIT:
        if spec.device.kind is not DeviceKind.CUDA:
            return f"bitsandbytes' 8-bit AdamW does its work in kernels that device={spec.device.kind.value} cannot run"
        if missing := _missing("bitsandbytes"):
            return missing
        if offload or spec.engine.name is EngineName.FSDP2:
            return "bitsandbytes' 8-bit AdamW takes whole parameters on the GPU, not offloaded or FSDP2's sharded ones"
    if spec.optimizer is Optimizer.ADAFACTOR and spec.engine.name is EngineName.FSDP2:
        return "transformers' Adafactor mixes plain tensors with FSDP2's sharded ones, which PyTorch refuses"
    if spec.optimizer is Optimizer.DEEPSPEED_FUSED_ADAM:
        if spec.device.kind is DeviceKind.CPU or offload:
            return "DeepSpeed's FusedAdam is a CUDA kernel: it steps parameters on the GPU alone"
        if spec.engine.name is EngineName.FSDP2:
            return "DeepSpeed's FusedAdam takes plain tensors, not FSDP2's sharded ones"
    if spec.optimizer is Optimizer.DEEPSPEED_CPU_ADAM:
        if spec.engine.name is EngineName.FSDP2:
            return "DeepSpeed's CPUAdam takes plain tensors, not FSDP2's sharded ones"
        if spec.device.kind is not DeviceKind.CPU and not offload:
            return "DeepSpeed's CPUAdam steps parameters on the host: it needs engine.optimizer_offload=true"
    return None


def _savers(spec: CellSpec) -> str | None:
    if not spec.gradient_checkpointing and (spec.checkpoint_reentrant or spec.checkpoint_every > 1):
        return "without gradient_checkpointing there is nothing that could be re-entrant or every n-th layer"
    if (spec.liger or spec.loss is Loss.FUSED) and (missing := _missing("liger_kernel", "liger-kernel")):
        return missing
    if spec.attention is Attention.FLASH and (missing := _missing("flash_attn", "flash-attn")):
        return missing
    if spec.lora and (missing := _missing("peft")):
        return missing
    return None


def _missing(module: str, package: str | None = None) -> str | None:
    """A sentence where an optional library is not installed; finding it does not import it."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"the package {package or module} is not installed here"
