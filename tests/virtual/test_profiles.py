import dataclasses

import pytest

from sweep import virtual


def test_each_profile_is_complete_or_says_unknown() -> None:
    profiles = virtual.gpus()
    assert "a100-80gb" in profiles
    assert "rtx4090" in profiles
    for key, profile in profiles.items():
        assert profile.key == key
        assert float(profile.compute_capability) >= 7
        assert 10 << 30 < profile.total_memory_bytes <= (profile.nvml_total_bytes or 0)
        assert profile.context_bytes is None or 50 << 20 < profile.context_bytes < 1 << 30
        assert profile.source


def test_an_unknown_context_is_assumed_not_invented() -> None:
    profile = virtual.gpu("h100-80gb")
    assert profile.context_bytes is None
    assert profile.assumed_context_bytes == virtual.ASSUMED_CONTEXT_BYTES


def test_values_can_be_overridden() -> None:
    smaller = dataclasses.replace(virtual.gpu("a100-80gb"), total_memory_bytes=20 << 30)
    assert virtual.gpu_variables(smaller)["VGPU_TOTAL_MEMORY_BYTES"] == str(20 << 30)


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(virtual.VirtualGpuError, match=r"no GPU profile 'a1000'; choose one of t4, .*h100-80gb"):
        virtual.gpu("a1000")
