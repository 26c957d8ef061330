"""The training process: one per rank, one cell, then the end. It reads `spec.json` and writes `rank<k>.json`."""

EXIT_OOM = 77
EXIT_FAILED = 70
