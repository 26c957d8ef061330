"""Counts the work of a published measurement under the software of its time: a plain script, run on a virtual GPU."""

from pathlib import Path

import torch

from sweep.estimate.count import count_iteration
from sweep.virtual.benchmark.train_zero3 import arguments, build


def main() -> None:
    parser = arguments()
    parser.add_argument("--output", type=Path, required=True, help="the folder to write work.json.gz to")
    options = parser.parse_args()
    step = build(options)
    for _ in range(options.steps):
        step()
    options.output.mkdir(parents=True, exist_ok=True)
    count_iteration(step, torch.cuda.get_device_properties(0).multi_processor_count).save(options.output)


if __name__ == "__main__":
    main()
