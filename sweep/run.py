"""The Hydra application: `python -m sweep.run -m model=llama3-8b batch_size=1,2,4 gradient_checkpointing=false,true`.

One Hydra job is one cell. The sweeper (`hydra_plugins/sweep_until_oom`) decides which cells; a job looks its cell up
in the store, or launches it and saves the record, and returns a small result. It never raises for what a cell did.
"""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sweep.config import CONF, job_from
from sweep.launch import run_cell
from sweep.store import RESULTS, Store


def run(config: DictConfig) -> dict[str, object]:
    """Measure one cell: its status, its identity, and whether the record was there already."""
    job = job_from(config)
    record, stored = run_cell(job.spec, Store(RESULTS / job.sweep), list(HydraConfig.get().overrides.task))
    return {"status": record.status.value, "cell_id": record.cell_id, "stored": stored}


def main() -> None:
    from sweep.usage import fail_on_unknown_option

    fail_on_unknown_option(sys.argv[1:])
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()


if __name__ == "__main__":
    main()
