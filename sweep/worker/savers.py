"""Memory savers that are put on a built model: attention, kernels, adapters, checkpointing, compilation."""

from typing import Any

from torch import nn

from sweep.spec import Attention, CellSpec, EngineName, LoraSpec, Loss, Precision
from sweep.worker.failure import NotInEffectError

ATTENTION = {Attention.EAGER: "eager", Attention.SDPA: "sdpa", Attention.FLASH: "flash_attention_2"}


def apply_savers(spec: CellSpec, model: nn.Module) -> nn.Module:
    """The model as the spec wants it trained; the same object, except that adapters wrap it."""
    if spec.attention is not None:
        choose_attention(model, spec.attention)
    if spec.liger or spec.loss is Loss.FUSED:
        apply_liger(model, kernels=spec.liger, loss=spec.loss is Loss.FUSED)
    if spec.gradient_checkpointing:
        enable_checkpointing(model, reentrant=spec.checkpoint_reentrant, every=spec.checkpoint_every)
    if spec.lora is not None:
        # Mixed precision trains fp32 adapters; DeepSpeed keeps the fp32 copies in its own optimizer.
        half = spec.precision is Precision.BF16_PURE or spec.engine.name is EngineName.DEEPSPEED
        if spec.gradient_checkpointing:
            ask_for_gradients(model)
        model = add_adapters(model, spec.lora, in_fp32=not half)
    if spec.compile:
        model.compile()
    return model


def asked_for(spec: CellSpec) -> list[str]:
    """Names of the savers that are on, checkpointing aside."""
    on = {
        "attention": spec.attention is not None,
        "liger": spec.liger,
        "loss": spec.loss is not Loss.FULL,
        "lora": spec.lora is not None,
        "compile": spec.compile,
    }
    return [name for name, value in on.items() if value]


def choose_attention(model: Any, attention: Attention) -> None:
    model.set_attn_implementation(ATTENTION[attention])
    chosen = model.config._attn_implementation
    if chosen != ATTENTION[attention]:
        raise NotInEffectError(f"attention={attention.value} is not in effect: the model chose {chosen}")


def apply_liger(model: Any, *, kernels: bool, loss: bool) -> None:
    """Liger's kernels, its fused linear cross-entropy, or both. Raises where Liger does not know the architecture."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise NotInEffectError(f"liger={str(kernels).lower()} is not in effect: Liger has no kernels for {kind}")
    chosen = dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), kernels)
    _apply_liger_kernel_to_instance(model, **chosen, cross_entropy=False, fused_linear_cross_entropy=loss)


def enable_checkpointing(model: Any, *, reentrant: bool, every: int) -> None:
    """Of each `every` layers the first is recomputed. transformers 5 renamed the method that switches it on."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    for number, layer in enumerate(checkpointable_layers(model)):
        layer.gradient_checkpointing = number % every == 0


def checkpointable_layers(model: nn.Module) -> list[Any]:
    """transformers' GradientCheckpointingLayer and its descendants; by name, since older versions have none."""
    return [
        module
        for module in model.modules()
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
    ]


def ask_for_gradients(model: Any) -> None:
    """Of the frozen embeddings' output, without which re-entrant checkpointing computes no gradients behind it."""
    model.enable_input_require_grads()


def add_adapters(model: Any, lora: LoraSpec, *, in_fp32: bool) -> nn.Module:
    """Everything but the adapters is frozen; they have the model's dtype, or fp32."""
    import peft

    config = peft.LoraConfig(r=lora.rank, target_modules=list(lora.targets) or "all-linear", bias="none")
    adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=in_fp32)
    return adapted.train()
