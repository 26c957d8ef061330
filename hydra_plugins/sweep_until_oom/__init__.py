"""Hydra sweeper that walks the batch size of every series until out of memory.

All axes but the batch size are expanded as a grid; `sweep.plan` decides each series' next batch size from what is
known. One cell per live series and round is handed to the launcher, so that a parallel launcher has work.
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig

from sweep.config import Job, job_from
from sweep.environment import DeviceError, choose_device
from sweep.plan import Search, SearchMethod, next_batch_size
from sweep.record import CellRecord, Status
from sweep.screen import Screen
from sweep.spec import DeviceKind, SpecError
from sweep.store import PLOTS, RESULTS, Store, StoreError
from sweep.usage import fail


@dataclass
class Walk:
    """One series on its way."""

    overrides: list[str]
    """All but the batch size."""
    job: Job
    outcomes: dict[int, Status] = field(default_factory=dict)


class UntilOom(Sweeper):
    def __init__(self, search: str, max_batch_size: int, params: Mapping[str, Any] | None = None) -> None:
        self._method = search
        self._max_batch_size = max_batch_size
        self._params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._config = config
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        screen = Screen()
        try:
            walks, search = self._plan(arguments, screen)
            stores = {walk.job.sweep: Store(RESULTS / walk.job.sweep) for walk in walks}
            with ExitStack() as held:
                for store in stores.values():
                    held.enter_context(store.lock())
                self._walk(walks, search, stores, screen)
                records = self._conclude(walks, stores, screen)
        except (SpecError, DeviceError, StoreError) as error:
            fail(str(error))
        if any(not record.status.final for record in records):
            raise SystemExit(3)

    def _plan(self, arguments: list[str], screen: Screen) -> tuple[list[Walk], Search]:
        """Compose and validate every series before anything is run or written."""
        arguments, params = self._with_device(arguments, screen)
        axes, batch_sizes = self._axes([f"{key}={value}" for key, value in params.items()] + arguments)
        try:
            method = SearchMethod(self._method)
        except ValueError:
            known = ", ".join(method.value for method in SearchMethod)
            raise SpecError("hydra.sweeper.search", self._method, f"choose one of {known}") from None
        walks = []
        for overrides in itertools.product(*axes.values()):
            config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
            jobs = [job_from(config, size) for size in batch_sizes or (1,)]
            walks.append(Walk(list(overrides), jobs[0]))
        return walks, Search(method=method, max_batch_size=self._max_batch_size, batch_sizes=batch_sizes)

    def _with_device(self, arguments: list[str], screen: Screen) -> tuple[list[str], dict[str, Any]]:
        """Replace `device=auto` by what it means here: that choice may bring other defaults and another grid."""
        if self._config.device.kind != "auto":
            return arguments, self._params
        kind, why = choose_device()
        screen.say(
            f"device=auto: {kind.value}, because {why}" if kind is not DeviceKind.CUDA else f"device=auto: {why}"
        )
        arguments = [a for a in arguments if not a.startswith("device=")] + [f"device={kind.value}"]
        config = self._context.config_loader.load_configuration(
            config_name=self._config.hydra.job.config_name,
            overrides=[*map(str, self._config.hydra.overrides.hydra), *arguments],
            run_mode=RunMode.MULTIRUN,
        )
        return arguments, dict(config.hydra.sweeper.params or {})

    def _axes(self, arguments: Sequence[str]) -> tuple[dict[str, list[str]], tuple[int, ...] | None]:
        """Each key's overrides, the last mention of a key winning; and the batch sizes, where they are given."""
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        axes: dict[str, list[str]] = {}
        batch_sizes: tuple[int, ...] | None = None
        for override in parser.parse_overrides(list(arguments)):
            if override.get_key_element() == "batch_size":
                batch_sizes = _batch_sizes(override)
                continue
            key = override.get_key_element()
            axes[key] = [f"{key}={value}" for value in _values(override)]
        return axes, batch_sizes

    def _walk(self, walks: list[Walk], search: Search, stores: Mapping[str, Store], screen: Screen) -> None:
        """Rounds of one cell per live series, until no series has a next batch size."""
        started = 0
        # Hydra's own launcher runs jobs one after the other: a job at a time keeps the screen up to date.
        at_once = 1 if isinstance(self._launcher, BasicLauncher) else len(walks)
        live = list(walks)
        with screen.series(len(walks)):
            while live:
                for i in range(0, len(live), at_once):
                    batch = [(walk, next_batch_size(walk.outcomes, search)) for walk in live[i : i + at_once]]
                    going = [(walk, size) for walk, size in batch if size is not None]
                    if not going:
                        continue
                    screen.measuring([replace(walk.job.spec, batch_size=size) for walk, size in going])
                    jobs = [[*walk.overrides, f"batch_size={size}"] for walk, size in going]
                    results = self._launcher.launch(jobs, initial_job_idx=started)
                    started += len(jobs)
                    for (walk, size), result in zip(going, results, strict=True):
                        self._take(walk, size, result.return_value, stores[walk.job.sweep], screen)
                finished = [walk for walk in live if next_batch_size(walk.outcomes, search) is None]
                for _ in finished:
                    screen.series_done()
                live = [walk for walk in live if walk not in finished]
                for store in stores.values():
                    store.write_table()

    def _take(self, walk: Walk, size: int, result: Any, store: Store, screen: Screen) -> None:
        walk.outcomes[size] = Status(result["status"])
        record = store.cell(result["cell_id"]).read_record()
        assert record is not None
        screen.measured(record, stored=result["stored"])

    def _conclude(self, walks: list[Walk], stores: Mapping[str, Store], screen: Screen) -> list[CellRecord]:
        """Charts and the table of this sweep's series; gives the records they stand on."""
        from sweep import plots, report

        wanted = {walk.job.spec.series_id for walk in walks}
        all_records: list[CellRecord] = []
        for store in stores.values():
            records = [record for record in store.records() if record.series_id in wanted]
            all_records += records
            report.print_summary(screen.console, records)
            drawn = plots.draw(store, PLOTS / store.name)
            screen.say(f"Records in {store.path}/, {store.table_path.name} among them")
            screen.say(f"Charts in {PLOTS / store.name}/ ({len(drawn)} files)")
        return all_records


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if not override.is_discrete_sweep():
        raise SpecError(
            override.get_key_element(), override.input_line, "sweep it with a list such as a,b or range(1,5)"
        )
    return [str(value) for value in override.sweep_string_iterator()]


def _batch_sizes(override: Override) -> tuple[int, ...] | None:
    values = _values(override)
    if values == ["???"]:
        return None
    sizes = []
    for value in values:
        if not value.isdigit() or int(value) < 1:
            raise SpecError(
                "batch_size",
                value,
                "give a whole number of 1 or more, or leave it out to search until out of memory",
            )
        sizes.append(int(value))
    return tuple(sorted(set(sizes)))
