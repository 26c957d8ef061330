"""Not a test: the causal-language-modelling example of the transformers documentation, with local random data.

Prints what the Trainer logged as one JSON line.
"""

import importlib
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, default_data_collator

warnings.filterwarnings("ignore")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"bf16": True, "save_strategy": "steps", "save_steps": 3},
    "fp16": {"fp16": True},
    "accumulation": {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "zero3": {
        "bf16": True,
        "deepspeed": {
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": "auto"},
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
        },
    },
    "fsdp": {
        "bf16": True,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    },
    "liger": {"bf16": True, "use_liger_kernel": True},
    "lora": {"bf16": True},
    "compile": {"bf16": True, "torch_compile": True},
}


class RandomBlocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Blocks of tokens, as the example's ``group_texts`` makes them."""

    def __init__(self, count: int, block_size: int = 128) -> None:
        generator = torch.Generator().manual_seed(0)
        self.blocks = torch.randint(0, 1000, (count, block_size), generator=generator)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.blocks[index]
        return {"input_ids": block, "attention_mask": torch.ones_like(block), "labels": block}


def main(mode: str, folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=2e-5,
        weight_decay=0.01,
        max_steps=4,
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        **({"save_strategy": "no"} | OPTIONS[mode]),
    )
    model = AutoModelForCausalLM.from_config(config)
    if mode == "lora":
        peft: Any = importlib.import_module("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=RandomBlocks(256),
        eval_dataset=RandomBlocks(32),
        data_collator=default_data_collator,
    )
    trainer.train()
    perplexity = math.exp(trainer.evaluate()["eval_loss"])
    names = ("loss", "grad_norm", "eval_loss")
    logged = [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
    answer = {"logged": sorted({float(number) for number in logged}), "entries": len(logged), "perplexity": perplexity}
    print("answer:", json.dumps(answer | {"world_size": arguments.world_size}))


main(sys.argv[1], Path(sys.argv[2]))
