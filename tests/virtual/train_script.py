"""Not a test: a training script for rank 0 of any engine, run on virtual GPUs. Prints its peaks as one JSON line."""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
Step = Callable[[torch.Tensor], tuple[torch.Tensor, Any]]
CONFIGS = {
    "tiny": {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    "1b": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8b": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}


def build(size: str, checkpointing: bool) -> LlamaForCausalLM:
    heads = 4 if size == "tiny" else 32
    config = LlamaConfig(
        **CONFIGS[size],
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        tie_word_embeddings=size == "1b",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def deepspeed_step(stage: int, size: str, batch_size: int, checkpointing: bool) -> Step:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.init_distributed("nccl")
    where = deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else torch.device("cuda")
    with where:
        model = build(size, checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss, engine.get_global_grad_norm()

    return step


def torch_step(engine: str, size: str, checkpointing: bool) -> Step:
    if engine != "single":
        dist.init_process_group("nccl")
    with torch.device("cuda"):
        model = build(size, checkpointing)
    wrapped = model
    if engine == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    if engine == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        for part in (*model.model.layers, model):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=engine != "fsdp2"):
            loss = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, float(norm)

    return step


def main(engine: str, size: str, batch_size: int, length: int, checkpointing: bool, steps: int) -> None:
    torch.cuda.set_device(0)
    if engine.startswith("zero"):
        step = deepspeed_step(int(engine[4]), size, batch_size, checkpointing)
    else:
        step = torch_step(engine, size, checkpointing)
    tokens = torch.randint(0, 1000, (batch_size, length)).to("cuda")
    losses = []
    for _ in range(steps):
        loss, norm = step(tokens)
        losses += [loss.item(), float(norm or 0)]
    stats = {name: number for name, number in torch.cuda.memory_stats().items() if isinstance(number, int)}
    answer: dict[str, Any] = {
        "losses": sorted(set(losses)),
        # not inactive_split: autocast frees its cached weights in the order of their host addresses
        "peaks": {
            name: stats[name]
            for pool in ("all", "small_pool", "large_pool")
            for name in (f"{kind}_bytes.{pool}.peak" for kind in ("allocated", "active", "reserved", "requested"))
        },
    }
    answer |= {"retries": stats["num_alloc_retries"], "free": torch.cuda.mem_get_info()[0]}
    print("answer:", json.dumps(answer, sort_keys=True))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "True", int(sys.argv[6]))
