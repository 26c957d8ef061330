"""Not a test: run on gloo ranks by `test_engines.py`. Prints by how much each engine strays from plain PyTorch."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from conftest import read_model
from torch import nn
from torch.distributed.tensor import DTensor

from sweep.spec import CellSpec, from_json
from sweep.worker.engines import Engine, make_engine
from sweep.worker.model import build_model
from sweep.worker.train import join_world

ROWS, STEPS, LEARNING_RATE, LENGTH = 4, 2, 1.0, 16
MODEL = read_model("tiny")
MODEL["config"] = MODEL["config"] | {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 64}
CPU = torch.device("cpu")


def cell(engine: Mapping[str, Any], world: int, accumulation: int) -> CellSpec:
    content = {
        "model": MODEL,
        "engine": engine,
        "device": {"kind": "cpu", "memory_limit_bytes": 2**30},
        "world_size": world,
        "batch_size": ROWS // accumulation,
        "accumulation": accumulation,
        "seq_len": LENGTH,
        "precision": "fp32",
        "optimizer": "sgd",
    }
    return from_json(CellSpec, content)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter in full, however it is sharded."""
    parameters = dict(model.named_parameters())
    sharded = [p for p in parameters.values() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded) if sharded else nullcontext():
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters.items()
        }


def steps_of(engine: Engine, rows: torch.Tensor, accumulation: int) -> list[dict[str, torch.Tensor]]:
    states = [whole(engine.model)]
    for step in range(STEPS):
        for part in rows[step].chunk(accumulation):
            with engine.micro_batch():
                engine.backward(engine.forward({"input_ids": part, "labels": part}))
                engine.step()
        states.append(whole(engine.model))
    assert engine.optimizer_steps == STEPS
    return states


def plain_steps(start: Mapping[str, torch.Tensor], rows: torch.Tensor, spec: CellSpec) -> list[dict[str, torch.Tensor]]:
    """PyTorch alone, one process, all ranks' rows in one batch."""
    model = build_model(spec, torch.float32)
    model.load_state_dict(dict(start), strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    states = [whole(model)]
    for step in range(STEPS):
        model(input_ids=rows[step], labels=rows[step]).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), spec.gradient_clipping or 0.0)
        optimizer.step()
        optimizer.zero_grad()
        states.append(whole(model))
    return states


def distance(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Largest differences of the first step's gradients, which are its changes, and of the last parameters."""

    def largest(pairs: Callable[[str], tuple[torch.Tensor, torch.Tensor]]) -> float:
        return max(float((a - b).abs().max()) for a, b in map(pairs, one[0]))

    changed = [{name: states[0][name] - states[1][name] for name in states[0]} for states in (one, other)]
    return {
        "gradients": largest(lambda name: (changed[0][name], changed[1][name])),
        "parameters": largest(lambda name: (one[-1][name], other[-1][name])),
        "moved": max(float(change.abs().max()) for change in changed[1].values()),
    }


def compare(engine: Mapping[str, Any], rank: int, world: int) -> dict[str, dict[str, float]]:
    every = torch.randint(1, 512, (STEPS, world * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    found = {}
    for accumulation in (1, ROWS):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        spec = cell(engine, world, accumulation)
        torch.manual_seed(0)
        made = make_engine(spec, CPU)
        made.load(partial(build_model, spec))
        made.prepare([{"params": list(made.model.parameters()), "lr": LEARNING_RATE}])
        mine = every[:, rank * ROWS : (rank + 1) * ROWS]
        states = steps_of(made, mine, accumulation)
        found[str(accumulation)] = distance(states, plain_steps(states[0], every, spec))
    return found


def main(engines: list[dict[str, Any]]) -> None:
    spec = cell({"name": "deepspeed", "zero_stage": 0}, int(sys.argv[2]), 1)
    join_world(spec, CPU)
    rank, world = dist.get_rank(), dist.get_world_size()
    answer = [compare(engine, rank, world) for engine in engines]
    if rank == 0:
        print("answer:", json.dumps(answer))


main(json.loads(sys.argv[1]))
