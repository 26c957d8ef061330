"""The Hydra application: `python -m sweep.run -m model=llama3-8b batch_size=1,2,4 gradient_checkpointing=false,true`.

One Hydra job is one cell. The sweeper (`hydra_plugins/sweep_until_oom`) decides which cells; a job looks its cell up
in the store, or launches it and saves the record, and returns it. It never raises for what a cell did.
"""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sweep.config import CONF, job_from
from sweep.launch import run_cell
from sweep.record import CellRecord
from sweep.store import RESULTS, Store


def run(config: DictConfig) -> CellRecord:
    """Measure one cell. Gives its record, which is in the store unless its folder cannot be written."""
    job = job_from(config)
    overrides = list(HydraConfig.get().overrides.task)
    return run_cell(job.spec, Store(RESULTS / job.sweep), overrides, force=bool(config.force))


def main() -> None:
    from sweep.usage import fail_on_mistakes

    sys.argv[1:] = ["dry_run=true" if argument == "--dry-run" else argument for argument in sys.argv[1:]]
    fail_on_mistakes(sys.argv[1:])
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()


if __name__ == "__main__":
    main()
