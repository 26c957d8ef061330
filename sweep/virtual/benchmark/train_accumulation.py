"""Fine-tuning Pythia-1.4B with accelerate's gradient accumulation, as in the published measurement: SGD, 8 tokens.

A plain script for the software of its time; it knows nothing of virtual GPUs. Prints one JSON line.
"""

import argparse
import json

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, GPTNeoXConfig

CONFIG = GPTNeoXConfig(
    vocab_size=50304,
    hidden_size=2048,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=8192,
    rotary_pct=0.25,
    max_position_embeddings=2048,
    use_parallel_residual=True,
    tie_word_embeddings=False,
    use_cache=False,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()

    accelerator = Accelerator(
        mixed_precision="no" if options.precision == "fp32" else options.precision,
        gradient_accumulation_steps=options.accumulation,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model.train()
    model.gradient_checkpointing_enable()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    tokens = torch.randint(0, 1000, (1, 8), device="cuda")
    for _ in range(options.steps * options.accumulation):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
    stats = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.peak", "active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries")
    print(json.dumps({"status": "ok", **{name: stats[name] for name in names}}))


main()
