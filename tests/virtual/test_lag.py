import pytest

from .conftest import Script

SIDE_STREAM = """
import torch
side = torch.cuda.Stream()
a = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
for _ in range(20):
    with torch.cuda.stream(side):
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    b = a @ a
    block.record_stream(torch.cuda.current_stream())
    del block
ahead = torch.cuda.memory_stats()["active_bytes.all.peak"] >> 20
torch.cuda.synchronize()
torch.empty(1, device="cuda")
answer = {"ahead": ahead, "after": torch.cuda.memory_stats()["active_bytes.all.current"] >> 20}
"""


def test_without_lag_a_block_is_free_at_once(on_gpu: Script) -> None:
    assert on_gpu(SIDE_STREAM, lag="none")["ahead"] < 256


@pytest.mark.parametrize("lag", ["until-sync", "simulated"])
def test_with_lag_a_block_stays_active_until_the_device_is_there(on_gpu: Script, lag: str) -> None:
    answer = on_gpu(SIDE_STREAM, lag=lag)
    assert answer["ahead"] > 1000
    assert answer["after"] < 256


def test_polling_an_event_ends(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        a = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(20):
            a = a @ a
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        polls = 0
        while not event.query():
            polls += 1
        answer = {"polls": polls, "elapsed": event.elapsed_time(event)}
        """,
        lag="simulated",
    )
    assert answer["polls"] > 100
    assert answer["elapsed"] > 0
