"""Not a test: run on virtual GPUs by `test_engines.py`. Prints whether each engine trains the weights of a folder.

Copies between the host and a virtual GPU are real, so that what was loaded can be read back.
"""

import json
import os
import sys

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from sweep.spec import CellSpec, from_json
from sweep.worker.engines import make_engine
from sweep.worker.model import build_model
from sweep.worker.train import join_world

DEVICE = torch.device("cuda", 0)


def trains_what_was_saved(content: dict[str, object]) -> bool:
    spec = from_json(CellSpec, content)
    join_world(spec, DEVICE)
    engine = make_engine(spec, DEVICE)
    engine.load(lambda dtype: build_model(spec, dtype))
    engine.prepare()
    saved = dict(AutoModelForCausalLM.from_pretrained(str(spec.model.path)).named_parameters())
    trained = dict(engine.model.named_parameters())
    assert trained.keys() == saved.keys()
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in trained.items()}
    return all(p.is_cuda and torch.equal(p.detach().cpu(), saved[name]) for name, p in local.items())


for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)  # one process, whatever the number of devices
print("answer: " + json.dumps(trains_what_was_saved(json.loads(sys.argv[1]))))
