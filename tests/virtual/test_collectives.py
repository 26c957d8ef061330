import pytest

from .conftest import Script

HEAD = """
import warnings
warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist
"""


@pytest.mark.parametrize(
    "backend", ["'nccl'", "None", "'cpu:gloo,cuda:nccl'", "'nccl', device_id=torch.device('cuda', 0)"]
)
def test_a_world_without_the_others(on_gpu: Script, backend: str) -> None:
    answer = on_gpu(
        HEAD
        + f"""
torch.cuda.set_device(0)
dist.init_process_group({backend})
mine = torch.tensor([3, 4], device="cuda")
gathered = [torch.zeros_like(mine) for _ in range(8)]
dist.all_gather(gathered, mine)
total = mine.clone()
dist.all_reduce(total)
mean = torch.tensor([1.5], device="cuda", dtype=torch.bfloat16)
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
objects = [None] * 8
dist.all_gather_object(objects, {{"rank": "some", "long": list(range(5000))}})
collected = [None] * 8
dist.gather_object("here", collected, dst=0)
received = ["hello"]
dist.broadcast_object_list(received, src=0)
part = dist.new_group([0, 1, 2, 3])
in_part = [None] * 4
dist.all_gather_object(in_part, 1, group=part)
others = dist.new_group([4, 5])
host = dist.new_group(backend="gloo")
on_host = [torch.zeros(1) for _ in range(8)]
dist.all_gather(on_host, torch.ones(1), group=host)
dist.barrier(group=host)
dist.monitored_barrier(group=host)
mesh = dist.init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
dist.barrier()
answer = {{"world": [dist.get_rank(), dist.get_world_size()], "last": gathered[7].tolist(), "total": total.tolist(),
          "mean": mean.item(), "objects": len(objects), "long": len(objects[7]["long"]), "collected": collected,
          "received": received, "in_part": in_part, "on_host": sum(t.item() for t in on_host),
          "mesh": mesh["shard"].size()}}
dist.destroy_process_group()
""",
        world_size=8,
    )
    assert answer == {
        "world": [0, 8],
        "last": [3, 4],
        "total": [24, 32],
        "mean": 1.5,
        "objects": 8,
        "long": 5000,
        "collected": ["here"] * 8,
        "received": ["hello"],
        "in_part": [1, 1, 1, 1],
        "on_host": 8.0,
        "mesh": 4,
    }


def test_nccl_takes_its_buffers_at_the_first_collective(on_gpu: Script) -> None:
    answer = on_gpu(
        HEAD
        + """
dist.init_process_group("nccl")
flag = torch.ones(1, device="cuda")
before = torch.cuda.mem_get_info()[0]
dist.all_reduce(flag)
answer = {"taken": before - torch.cuda.mem_get_info()[0]}
dist.destroy_process_group()
""",
        world_size=2,
    )
    assert answer == {"taken": 544 << 20}


def test_an_ordinary_process_forms_its_own_world(on_gpu: Script) -> None:
    answer = on_gpu(
        HEAD
        + """
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
dist.barrier()
answer = {"world": dist.get_world_size()}
dist.destroy_process_group()
"""
    )
    assert answer == {"world": 1}
