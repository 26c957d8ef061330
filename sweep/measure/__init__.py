"""What a rank measures of itself: memory by phase, device memory by NVML, time per iteration."""
