"""The Hydra application: `python -m sweep.run -m model=llama3-8b batch_size=1,2,4 gradient_checkpointing=false,true`.

One Hydra job is one cell. The sweeper (`hydra_plugins/sweep_until_oom`) decides which cells; a job looks its cell up
in the store, or launches it and saves the record, and returns its identity. It never raises for what a cell did.
"""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sweep.config import CONF, job_from
from sweep.launch import run_cell
from sweep.store import RESULTS, Store


def run(config: DictConfig) -> str:
    """Measure one cell. Gives its identity, under which the record is in the store."""
    job = job_from(config)
    overrides = list(HydraConfig.get().overrides.task)
    record = run_cell(job.spec, Store(RESULTS / job.sweep), overrides, force=bool(config.force))
    return record.cell_id


def main() -> None:
    from sweep.usage import fail_on_mistakes

    sys.argv[1:] = ["dry_run=true" if argument == "--dry-run" else argument for argument in sys.argv[1:]]
    fail_on_mistakes(sys.argv[1:])
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()


if __name__ == "__main__":
    main()
