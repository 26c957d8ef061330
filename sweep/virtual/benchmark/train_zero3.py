"""A full fine-tuning run as the published study did it: fp16, AdamW, ZeRO-3, 2048 tokens, the model built before
DeepSpeed knows of ZeRO-3, as ``from_pretrained`` outside of a Trainer does.

A plain script for the software of its time; it knows nothing of virtual GPUs. Prints one JSON line.
"""

import argparse
import json
from collections.abc import Callable

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

SEQUENCE_LENGTH = 2048
CONFIGS = {
    "llama3-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=500000.0,
        max_position_embeddings=8192,
    ),
    "qwen1.5-0.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=CONFIGS, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    return parser


def build(options: argparse.Namespace) -> Callable[[], None]:
    """Everything that comes before the loop; gives what one step of it does."""
    torch.cuda.set_device(0)
    deepspeed.init_distributed(dist_backend="nccl")
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(CONFIGS[options.model])
    torch.set_default_dtype(torch.float32)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    # The same states as DeepSpeed's FusedAdam, which would have to be compiled.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": options.batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3},
            "fp16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
        },
    )
    tokens = torch.randint(0, 32000, (options.batch_size, SEQUENCE_LENGTH), device="cuda")
    mask = torch.ones_like(tokens)

    def step() -> None:
        engine.backward(engine(input_ids=tokens, attention_mask=mask, labels=tokens).loss)
        engine.step()

    return step


def main() -> None:
    options = arguments().parse_args()
    step = build(options)
    status = "ok"
    try:
        for _ in range(options.steps):
            step()
    except torch.cuda.OutOfMemoryError:
        status = "oom"
    stats = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.peak", "active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries")
    print(json.dumps({"status": status, **{name: stats[name] for name in names}}))


if __name__ == "__main__":
    main()
