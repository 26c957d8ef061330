"""Two sweeps on one GPU, each with a folder of its own: they take turns, and the one that waits says for whom."""

import itertools
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from conftest import REPOSITORY

from sweep.environment import Gpu
from sweep.launch import turns
from sweep.launch.turns import lock_path, turn

CELLS = 4
SWEEP = """
    # Cells on a "real" GPU, whose workers only note when they begin and end.
    import sys, time
    from dataclasses import replace
    from pathlib import Path
    from conftest import read_model
    from sweep import environment, launch
    from sweep.launch import turns
    from sweep.environment import Gpu
    from sweep.spec import CellSpec, from_json
    from sweep.store import Store

    folder, uuids = Path(sys.argv[1]), sys.argv[2].split(",")
    turns.FOLDER = folder.parent
    environment.visible_gpus = lambda: [Gpu(name="H100", uuid=uuid) for uuid in uuids]
    worker = '''
    import json, sys, time
    from pathlib import Path
    cell, start = Path(sys.argv[1]), time.time()
    time.sleep(0.2)
    for rank in range(2):
        record = {"rank": rank, "device_name": "H100", "capacity_bytes": 1}
        (cell / f"rank{rank}.json").write_text(json.dumps(record))
    (cell.parent.parent / "turns").open("a").write(f"{start} {time.time()}" + chr(10))
    '''
    launch.command = lambda spec, cell: [sys.executable, "-c", worker, str(cell)]
    launch.process_environment = lambda spec, cell: {"SWEEP_CELL": cell, "SWEEP_PARENT_PID": "none"}
    launch.busy_reason = lambda gpus: None
    content = {"model": read_model("tiny"), "engine": {"name": "ddp"}, "device": {"kind": "cuda"}}
    spec = from_json(CellSpec, content | {"world_size": len(uuids), "batch_size": 1, "seq_len": 32})
    for seed in range(CELLS):
        record = launch.run_cell(replace(spec, seed=seed), Store(folder), [])
        print(record.status.value, record.duration_seconds, flush=True)
"""


def start(folder: Path, uuids: str) -> "subprocess.Popen[str]":
    program = textwrap.dedent(SWEEP).replace("CELLS", str(CELLS))
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder), uuids],
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_cells_of_two_sweeps_never_overlap_on_a_gpu(tmp_path: Path) -> None:
    # The second names the shared devices the other way round: neither ends up holding what the other wants.
    both = [start(tmp_path / "a", "GPU-1,GPU-2"), start(tmp_path / "b", "GPU-2,GPU-1")]
    said = [sweep.communicate(timeout=300) for sweep in both]
    assert [out.split()[::2] for out, _ in said] == [["ok"] * CELLS] * 2, said
    spans = sorted(
        tuple(map(float, line.split()))
        for name in ("a", "b")
        for line in (tmp_path / name / "turns").read_text().splitlines()
    )
    assert len(spans) == 2 * CELLS
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), spans
    # What a cell took is told without the time that it waited: all together fit into the time that passed.
    took = [float(seconds) for out, _ in said for seconds in out.split()[1::2]]
    assert sum(took) < spans[-1][1] - spans[0][0] + max(took)
    waits = [line for _, err in said for line in err.splitlines() if line.startswith("sweep: waiting for")]
    assert waits
    for line in waits:
        assert re.fullmatch(rf"sweep: waiting for H100 \(GPU-\d\), held by {tmp_path}/[ab] \(pid \d+\)", line), line


HOLDER = """
    import sys
    from pathlib import Path
    from sweep.environment import Gpu
    from sweep.launch import turns
    turns.FOLDER = Path(sys.argv[1])
    with turns.turn([Gpu(name="H100", uuid="GPU-1")], who="results/other"):
        print("held", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("state", ["held", "killed", "another GPU", "a folder that is not there"])
def test_a_turn_is_waited_for_and_goes_with_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    monkeypatch.setattr(turns, "FOLDER", tmp_path)
    wanted = Gpu(name="H100", uuid="GPU-2" if state == "another GPU" else "GPU-1")
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    if state == "killed":
        holder.kill()
        holder.wait()
    elif state == "held":
        threading.Timer(1.0, holder.stdin.close).start()
    elif state == "a folder that is not there":
        monkeypatch.setattr(turns, "FOLDER", tmp_path / "none")
    with turn([wanted], who="results/mine"):
        if state != "a folder that is not there":
            assert lock_path(wanted).read_text() == f"results/mine (pid {os.getpid()})"
    waited = f"sweep: waiting for H100 (GPU-1), held by results/other (pid {holder.pid})\n"
    assert capsys.readouterr().err == (waited if state == "held" else "")
    if not holder.stdin.closed:
        holder.stdin.close()
    with holder.stdout:
        holder.wait(timeout=60)
