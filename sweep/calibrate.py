"""Fit the estimates of a GPU to what was measured on it: `sweep calibrate results/NAME [--apply results/VIRTUAL ...]`.

The work of each measured cell is counted on the virtual GPU, which takes seconds a cell. The factors go to
`calibration/<gpu>.json`, where every later estimate for that GPU finds them; `--apply` estimates cells anew that are
there already. Imported measurements count as well, though another version of the software may have done other work.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sweep import analysis, virtual
from sweep.estimate.cell import estimate_of
from sweep.estimate.factors import CALIBRATION, Calibration
from sweep.estimate.fit import Measured, fit
from sweep.estimate.work import read_work
from sweep.launch import run_cell
from sweep.prior import virtual_twin
from sweep.record import CellRecord, Status, TimingKind
from sweep.spec import SpecError
from sweep.store import Store, StoreError


class CalibrationError(ValueError):
    """Nothing can be fitted; one sentence."""


def measured_cells(records: Sequence[CellRecord], counted: Store) -> dict[str, list[Measured]]:
    """The cells that ran well and were timed, by GPU profile, with work counted in the store `counted`.

    Sizes that the allocator slows down are left out: their time is not that of their work.
    """
    found: dict[str, list[Measured]] = {}
    series = analysis.series_of(records)
    slowed = {record.cell_id for one in series for size, record in one.records.items() if size in one.thrashing}
    for record in records:
        rank, seconds = record.largest_rank, record.seconds_per_iteration
        if record.status is not Status.OK or record.cell_id in slowed or rank is None or seconds is None:
            continue
        twin = virtual_twin(record.spec, rank.device_name)
        if twin is None or twin.device.gpu is None:
            continue
        cell = run_cell(twin, counted, [])
        work = read_work(counted.cell(cell.cell_id).path)
        if work is None:
            print(f"batch size {twin.batch_size}: not counted, {cell.reason or cell.status.value}", file=sys.stderr)
            continue
        found.setdefault(twin.device.gpu.key, []).append(Measured(work=work, seconds_per_iteration=seconds))
    return found


def calibrate(store: Store, folder: Path) -> list[Calibration]:
    """Fits every GPU that the results were measured on. Raises `CalibrationError`."""
    if (obstacle := virtual.check()) is not None:
        raise CalibrationError(f"the work cannot be counted here: {obstacle}")
    counted = Store(store.path.parent / f"{store.name}-counted")
    cells = measured_cells(store.records(), counted)
    if not cells:
        raise CalibrationError(f"{store.path} holds no cell that was timed on a GPU with a profile")
    fitted = [fit(each, virtual.gpu(key), store.name) for key, each in cells.items()]
    for one in fitted:
        one.save(folder)
    return fitted


def apply(store: Store, folder: Path) -> int:
    """Estimates the cells of a sweep anew, with the factors that there are now; how many. Raises `CalibrationError`."""
    count = 0
    if not store.path.is_dir():
        raise CalibrationError(f"{store.path} is no folder of results")
    with store.lock():
        for record in store.records():
            if record.timing_kind is not TimingKind.ESTIMATED:
                continue
            estimate = estimate_of(record.spec, store.cell(record.cell_id).path, folder)
            if estimate is not None:
                store.save(replace(record, estimate=estimate))
                count += 1
        store.write_table()
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep calibrate", description="Fit estimated times to measured ones.")
    parser.add_argument("results", type=Path, help="a folder of results with measured times")
    applied = "a sweep whose times are estimated anew with the factors found"
    parser.add_argument("--apply", type=Path, action="append", default=[], metavar="results/VIRTUAL", help=applied)
    parser.add_argument(
        "--folder", type=Path, default=CALIBRATION, help="where factors are kept; default: calibration/"
    )
    options = parser.parse_args(arguments)
    try:
        for one in calibrate(Store(options.results.resolve()), options.folder):
            print(
                f"{options.folder / one.gpu}.json: fitted to {one.cells} cells, half of them within "
                f"{one.median_error:.1%}, all within {one.largest_error:.1%}; estimates are given with "
                f"{one.uncertainty:.0%}"
            )
        for path in options.apply:
            print(f"{path}: {apply(Store(path.resolve()), options.folder)} cells estimated anew")
    except (CalibrationError, SpecError, StoreError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
