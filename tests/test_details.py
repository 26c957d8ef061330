"""What a record holds besides its headline, in words."""

from dataclasses import replace
from typing import Any

from test_analysis import CUDA, GIB, MIB, cell, out_of_memory, rank_of, spec, study

from sweep.analysis import details, noteworthy, series_of
from sweep.page import page
from sweep.record import CellRecord, InEffect, IterationParts, NvmlMemory
from sweep.summary import markdown

PARTS = IterationParts(
    data_seconds=(0.01, 0.01), forward_seconds=(0.3, 0.3), backward_seconds=(0.6, 0.6), optimizer_seconds=(0.1, 0.1)
)
EFFECT = InEffect(
    layer_forwards=2,
    compute_dtypes=("bfloat16",),
    parameter_dtypes=("float32",),
    gradient_dtypes=("float32",),
    optimizer_state_dtypes=("float32",),
)


def nvml(baseline: int, process: int | None = None) -> NvmlMemory:
    return NvmlMemory(
        baseline_bytes=baseline, peak_bytes=baseline + 21 * GIB, samples=9, period_seconds=0.02, process_bytes=process
    )


def record(*changes: dict[str, Any]) -> CellRecord:
    return cell(spec(device=CUDA), ranks=[rank_of(k, 10_000, 20_000, 1.0, **one) for k, one in enumerate(changes)])


def test_a_plain_cell_has_details_and_nothing_noteworthy() -> None:
    plain = record({"parts": PARTS, "in_effect": EFFECT, "nvml": nvml(20 * MIB), "reserved_by_iteration_bytes": (9, 9)})
    assert details(plain) == [
        ("allocated, peak by phase", "backward 9.77 GiB"),
        ("NVML", "21.0 GiB more than before, in 9 samples"),
        ("seconds per iteration", "0.98 to 1.03"),
        ("parts of an iteration", "forward 30%, backward 60%, optimizer 10%; the host makes the data in 1.0% of that"),
        (
            "in effect",
            "computes in bf16, parameters fp32, gradients fp32, optimizer states fp32, "
            "a layer's forward runs twice, which recomputes it",
        ),
    ]
    assert noteworthy(plain) == []


def test_what_others_held_what_still_grows_and_uneven_ranks_are_noteworthy() -> None:
    uuid = "GPU-1"
    odd = record(
        {"nvml": nvml(2 * GIB, process=20 * GIB), "device_uuid": uuid},
        {"reserved_by_iteration_bytes": (5 * GIB, 6 * GIB, 7 * GIB)},
        {},
        {},
    )
    assert noteworthy(odd) == [
        ("in use before", "2.00 GiB of rank 0's A100-SXM4-80GB (GPU-1); others held 3.00 GiB at the end"),
        (
            "reserved",
            "still growing: on rank 1 by 1.00 GiB in the last iteration and 2.00 GiB since the warm-up, so that a "
            "longer run may need more",
        ),
        ("reserved, by rank", "18.4 GiB (rank 3) to 19.5 GiB (rank 0), 6.0% apart"),
    ]
    settled = record({"reserved_by_iteration_bytes": (5 * GIB, 7 * GIB, 7 * GIB)})
    assert noteworthy(settled) == []
    assert ("reserved, by iteration", "5.00 GiB after the warm-up, 7.00 GiB at the end") in details(settled)
    assert noteworthy(record({"reserved_by_iteration_bytes": (5 * GIB, 7 * GIB)})) == [], "it may just settle"
    assert set(noteworthy(odd)) <= {*details(odd)}
    text = markdown("x", [odd])
    assert "in use before: 2.00 GiB of rank 0's A100-SXM4-80GB (GPU-1)" in text.replace("\\", "")
    assert "in effect" not in text


def test_a_failure_says_what_the_device_had() -> None:
    failed = out_of_memory(spec())
    assert failed.failure is not None
    failed = replace(failed, failure=replace(failed.failure, free_bytes=3 * MIB, reserved_bytes=70 * GIB))
    assert details(failed) == [
        ("when it failed on rank 0", "asked for 1.96 GiB, free on the device 3 MiB, reserved 70.0 GiB")
    ]


def test_the_page_has_the_details_of_every_cell() -> None:
    records = study()
    text = page("study", records)
    assert text.count("<dt>reserved, by rank</dt>") == sum(len(one.measured) for one in series_of(records))
