"""Hydra sweeper that walks the batch size of every series until out of memory.

All axes but the batch size are expanded as a grid, once for every part of an experiment; `sweep.plan` decides each
series' next batch size from what is known. It drives any Hydra launcher: a parallel one gets one cell per live series
and round. Hydra's own launcher runs one job at a time, so that there one series is finished before the next, which may
then start from its limit.
"""

import itertools
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from sweep.config import job_from
from sweep.environment import DeviceError, choose_device, visible_gpus
from sweep.plan import Search
from sweep.prior import virtual_limit
from sweep.record import CellRecord, Status
from sweep.screen import Screen
from sweep.spec import DeviceKind, SizeAxis, SpecError, from_json
from sweep.store import PLOTS, RESULTS, Store, StoreError
from sweep.studies import QUESTIONS
from sweep.usage import fail, values_of
from sweep.walks import Budget, Spent, Walk, guess_from_similar, parts_meant, recall, series_along

LONGEST = 2**20
"""Tokens: where neither the model nor the user says how far to search."""
INTERRUPTED, INCOMPLETE = 130, 3
"""Exit codes: ended by the user; a cell failed, or nothing that was asked for makes sense."""


class UntilOom(Sweeper):
    def __init__(
        self, params: Mapping[str, Any] | None = None, parts: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._params = dict(params or {})
        self._parts = [dict(part) for part in parts or ()] or [{}]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._config = config
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        # Hydra's own launcher runs jobs one after the other.
        self._serial = isinstance(self._launcher, BasicLauncher)

    def sweep(self, arguments: list[str]) -> None:
        screen = Screen()
        try:
            budget = from_json(Budget, _plain(self._config.budget), "budget.")
            walks = self._plan(arguments, screen)
            stores = {walk.job.sweep: Store(RESULTS / walk.job.sweep) for walk in walks}
            if not self._config.force and (known := recall(walks, stores)):
                screen.say(f"{known} cells of these series are stored already")
            if self._config.dry_run:
                self._show(walks, screen)
                return
            code = self._measure(walks, stores, Spent(budget), screen)
        except (SpecError, DeviceError, StoreError) as error:
            fail(str(error))
        except OSError as error:
            fail(f"the results cannot be written: {error.strerror} ({error.filename}); free or change that place.")
        except KeyboardInterrupt:
            screen.say("Interrupted: what was measured is kept, and the same command goes on from there.")
            code = INTERRUPTED
        if code:
            raise SystemExit(code)

    def _measure(self, walks: list[Walk], stores: Mapping[str, Store], spent: Spent, screen: Screen) -> int:
        """Walk all series, then show what came out, also after an interruption. Gives the exit code."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the sweep as Ctrl-C does
        interrupted = False
        with ExitStack() as held:
            for store in stores.values():
                held.enter_context(store.lock())
            try:
                self._walk(walks, stores, spent, screen)
            except KeyboardInterrupt:
                interrupted = True
                screen.say("Interrupted: this is what there is so far; the same command goes on from here.")
            records = self._conclude(walks, stores, screen)
        if interrupted:
            return INTERRUPTED
        useful = any(record.status is not Status.UNSUPPORTED for record in records)
        # Also of the cells whose record could not be stored.
        statuses = {outcome.status for walk in walks for outcome in walk.outcomes.values()}
        final = all(status.final for status in statuses | {record.status for record in records})
        return 0 if useful and final else INCOMPLETE

    def _plan(self, arguments: list[str], screen: Screen) -> list[Walk]:
        """Compose and validate every series before anything is run or written."""
        arguments = self._with_device(arguments, screen)
        settings = _plain(self._config.search)
        if settings.pop("prior") not in ("none", "virtual"):
            raise SpecError("search.prior", self._config.search.prior, "choose none or virtual")
        del settings["axis"]  # of a job: what its sweep searches
        search = from_json(Search, settings, "search.")
        if (questions := self._config.questions) not in (None, *QUESTIONS):
            raise SpecError("questions", questions, f"choose one of {', '.join(QUESTIONS)}, or null")
        walks: dict[tuple[str, str], Walk] = {}
        for part in parts_meant(self._parts, arguments):
            grid = [f"{key}={value}" for key, value in {**self._params, **part}.items()]
            axes, batch_sizes = self._axes(grid + arguments)
            for overrides in itertools.product(*axes.values()):
                config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
                if OmegaConf.is_missing(config, SizeAxis.SEQ_LEN.value):
                    found = _length_walks(list(overrides), config, search, batch_sizes)
                else:
                    jobs = [job_from(config, batch_size=size) for size in batch_sizes or (1,)]
                    given = replace(search, batch_sizes=batch_sizes)
                    found = [Walk(overrides=list(overrides), job=jobs[0], search=given)]
                for walk in found:
                    walks.setdefault((walk.job.sweep, walk.series_id), walk)
        screen.with_length = any(walk.axis is SizeAxis.SEQ_LEN for walk in walks.values())
        return list(walks.values())

    def _with_device(self, arguments: list[str], screen: Screen) -> list[str]:
        """Replace `device=auto` by what it means here: that choice may bring other defaults and another grid."""
        if self._config.device.kind != "auto":
            return arguments
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
        self._params = dict(config.hydra.sweeper.params or {})
        self._parts = [dict(part) for part in config.hydra.sweeper.parts] or [{}]
        return arguments

    def _axes(self, arguments: Sequence[str]) -> tuple[dict[str, list[str]], tuple[int, ...] | None]:
        """Each key's overrides, the last mention of a key winning; and the batch sizes, where they are given."""
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        axes: dict[str, list[str]] = {}
        batch_sizes: tuple[int, ...] | None = None
        for override in parser.parse_overrides(list(arguments)):
            key = override.get_key_element()
            if key == "batch_size":
                batch_sizes = _batch_sizes(override)
            else:
                axes[key] = [f"{key}={value}" for value in values_of(override)]
        return axes, batch_sizes

    def _walk(self, walks: list[Walk], stores: Mapping[str, Store], spent: Spent, screen: Screen) -> None:
        """Rounds of one cell per live series, or one series after the other, until none has a next batch size."""
        with screen.series(len(walks)):
            live = list(walks)
            while live:
                for walk in [walk for walk in live if walk.next() is None]:
                    live.remove(walk)
                    screen.series_done()
                going = live[:1] if self._serial else live
                if going and (why := spent.exhausted):
                    screen.say(f"{why}: {len(live)} of {len(walks)} series are not finished")
                    return
                if going:
                    self._round(going, walks, stores, spent, screen)

    def _round(
        self, going: list[Walk], walks: list[Walk], stores: Mapping[str, Store], spent: Spent, screen: Screen
    ) -> None:
        for walk in going:
            if not walk.outcomes and walk.guess is None:
                walk.guess = guess_from_similar(walk, walks) or self._prior(walk, screen)
        sizes = [size for walk in going if (size := walk.next()) is not None]
        screen.measuring([walk.spec_at(size) for walk, size in zip(going, sizes, strict=True)])
        jobs = [walk.overrides_at(size) for walk, size in zip(going, sizes, strict=True)]
        results = self._launcher.launch(jobs, initial_job_idx=spent.cells)
        spent.cells += len(jobs)
        for walk, size, result in zip(going, sizes, results, strict=True):
            record: CellRecord | OSError = result.return_value
            if isinstance(record, OSError):
                raise record
            walk.take(size, record)
            screen.measured(record)
        for store in {id(store): store for store in stores.values()}.values():
            store.write_table()

    def _prior(self, walk: Walk, screen: Screen) -> int | None:
        spec = walk.job.spec
        if self._config.search.prior != "virtual" or spec.device.kind is not DeviceKind.CUDA:
            return None
        if walk.axis is not SizeAxis.BATCH_SIZE:
            return None
        store = Store(RESULTS / f"{walk.job.sweep}-virtual")
        with store.lock():
            limit = virtual_limit(spec, visible_gpus()[0].name, store, walk.search)
            store.write_table()
        screen.say(
            f"search.prior=virtual: {'nothing is known' if limit is None else f'{limit} fits'} on the virtual GPU"
        )
        return limit

    def _show(self, walks: list[Walk], screen: Screen) -> None:
        """What `dry_run` prints."""
        going = [(walk, size) for walk in walks if (size := walk.next()) is not None]
        for walk, size in going:
            screen.planned(walk.spec_at(size))
        given = [set(walk.search.batch_sizes or ()) - set(walk.outcomes) for walk, _ in going]
        searched = sum(3 + walk.search.points // 2 for walk, _ in going if not walk.search.batch_sizes)
        about = f"{'about' if searched else 'at most'} {sum(map(len, given)) + searched}"
        screen.say(f"{len(going)} of {len(walks)} series are not finished; {about} cells to measure")

    def _conclude(self, walks: list[Walk], stores: Mapping[str, Store], screen: Screen) -> list[CellRecord]:
        """Charts and the table of this sweep's series; gives the records they stand on."""
        from sweep import plots, report, studies

        questions = self._config.questions
        wanted, along = {walk.series_id for walk in walks}, {walk.axis for walk in walks}
        all_records: list[CellRecord] = []
        for store in stores.values():
            store.write_table()
            records = [
                record for record in store.records() if any(series_along(record, axis) in wanted for axis in along)
            ]
            if not records:
                continue
            all_records += records
            report.print_summary(screen.console, records)
            drawn = plots.draw(store, PLOTS / store.name)
            if questions:
                drawn += studies.draw(questions, records, PLOTS / store.name)
            screen.say(f"Records in {store.path}/, {store.table_path.name} among them")
            screen.say(f"Charts in {PLOTS / store.name}/ ({len(drawn)} files)")
        if questions:
            studies.show(screen.console, studies.answers(questions, all_records))
        return all_records


def _plain(config: DictConfig) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(config, resolve=True)
    return dict(content)


def _length_walks(
    overrides: list[str], config: DictConfig, search: Search, batch_sizes: tuple[int, ...] | None
) -> list[Walk]:
    """One walk over the sequence length for each given batch size."""
    axis, step = SizeAxis.SEQ_LEN, search.seq_len_step
    if batch_sizes is None:
        raise SpecError(axis.value, "???", "one of two is searched at a time: give batch_size, such as batch_size=1")
    walks = []
    overrides = [override for override in overrides if not override.startswith(f"{axis.value}=")]
    for size in batch_sizes:
        job = job_from(config, batch_size=size, seq_len=step)
        reach = min(length for length in (job.spec.model.context, search.max_seq_len, LONGEST) if length is not None)
        if reach < step:
            raise SpecError("search.max_seq_len", reach, f"give at least one step: search.seq_len_step is {step}")
        limited = replace(search, max_batch_size=reach // step)
        walks.append(Walk(overrides=[*overrides, f"batch_size={size}"], job=job, search=limited, axis=axis, unit=step))
    return walks


def _batch_sizes(override: Override) -> tuple[int, ...] | None:
    values = values_of(override)
    if values == ["???"]:
        return None
    for value in values:
        if not value.isdigit() or int(value) < 1:
            valid = "give a whole number of 1 or more, or leave it out to search until out of memory"
            raise SpecError("batch_size", value, valid)
    return tuple(sorted({int(value) for value in values}))
