"""``darlit grid run`` on this machine, with real fits of very small cells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cells import write_cell
from darlit.__main__ import main
from darlit.grid import local
from darlit.grid.cells import read_grid
from darlit.grid.local import make_slots
from darlit.grid.status import read_state
from darlit.grid.unchanged import asked
from darlit.grid.worker import Stopper, work
from darlit.run import DONE, INTERRUPTED, LOCKED, LockedError, RunFolder, hold
from grid.runs_on_disk import assert_events_are_monotone, comparable


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """`grid run` takes its process's stop signals until that ends; here the process goes on with other tests."""
    taken = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in taken}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _grid(folder: Path, *cells: str, seeds: tuple[int, ...] = (0,)) -> Path:
    path = folder / "pair.yaml"
    path.write_text(yaml.safe_dump({"groups": {"micro": {"cells": list(cells), "seeds": list(seeds)}}}))
    return path


def _command(verb: str, grid: Path, runs: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "darlit", "grid", verb, str(grid), f"--runs_dir={runs}", *options]


def _state(grid: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["grid", "status", str(grid), f"--runs_dir={runs}"]) == 0
    return capsys.readouterr().out


def test_half_a_grid_is_balanced_and_kept_runs_are_done(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arm in ("residual", "dar_full"):
        write_cell(tmp_path, data_folder, arm)
    order: list[tuple[str, int]] = []
    monkeypatch.setattr(local, "work", lambda task, *_: order.append((task.cell.arm, task.seed)) or DONE)
    grid = _grid(tmp_path, "micro_residual", "micro_dar_full", seeds=(3, 1))
    assert main(["grid", "run", str(grid), f"--runs_dir={tmp_path / 'runs'}"]) == 0
    assert order == [("residual", 3), ("dar_full", 3), ("residual", 1), ("dar_full", 1)]

    order.clear()
    (tmp_path / "kept" / "micro_dar_full").mkdir(parents=True)
    kept = {"identity": asked(read_grid(grid).cells[1], seed=3), "devices": 1}
    (tmp_path / "kept" / "micro_dar_full" / "seed_3.json").write_text(json.dumps(kept))
    call = ["grid", "run", str(grid), f"--runs_dir={tmp_path / 'runs'}", f"--kept={tmp_path / 'kept'}"]
    assert main(call) == 0
    assert order == [("residual", 3), ("residual", 1), ("dar_full", 1)]


def test_a_grid_is_worked_once_and_becomes_a_table(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm in ("residual", "dar_full"):
        write_cell(tmp_path, data_folder, arm)
    grid, runs = _grid(tmp_path, "micro_residual", "micro_dar_full"), tmp_path / "runs"
    command = _command("run", grid, runs, "--processes=2", "--threads=1", "--", "--trainer.log_every_n_steps=2")
    first = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert first.stdout.startswith("pair: 0 of 2 runs are done\n")
    folders = [runs / "micro_residual" / "seed_0", runs / "micro_dar_full" / "seed_0"]
    for folder in folders:
        assert [event["event"] for event in RunFolder(folder).attempts()] == ["start", "end"]
        assert b"step 20/20" in (folder / "log.txt").read_bytes()
        assert json.loads((folder / "summary.json").read_text())["curve"]["train"]["step"][0] == 2
    assert "2 done" in _state(grid, runs, capsys)

    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert again.stdout == "pair: 2 of 2 runs are done\n"
    assert main(["results", str(runs), f"--out={tmp_path / 'results'}", f"--grid={grid}", "--figures=none"]) == 0
    assert "| dar_full | 1 |" in (tmp_path / "results" / "table.md").read_text()


def test_a_failed_run_does_not_stop_the_others_and_says_why(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cell(tmp_path, data_folder, "residual", data__folder=str(tmp_path / "gone"))
    grid, runs = _grid(tmp_path, "micro_residual", seeds=(0, 1)), tmp_path / "runs"
    command = _command("run", grid, runs, "--processes=2")
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1
    assert "micro_residual seed 0: failed" in result.stdout
    assert "micro_residual seed 1: failed" in result.stdout
    state = _state(grid, runs, capsys)
    assert "2 failed" in state
    assert "exit status 2: darlit: error:" in state
    assert "does not exist" in state


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stopped_grid_goes_on_where_it_was(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    budget = {"tokens": 256 * 150, "batch_tokens": 256, "validation_interval": 10}
    write_cell(tmp_path, data_folder, "dar_full", budget=budget)
    grid, runs = _grid(tmp_path, "micro_dar_full", seeds=(0, 1)), tmp_path / "runs"
    first, second = (runs / "micro_dar_full" / f"seed_{seed}" for seed in (0, 1))
    process = subprocess.Popen(_command("run", grid, runs), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (first / "checkpoints" / "last.ckpt").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=100) == INTERRUPTED
    assert not (first / "summary.json").exists()
    assert not second.exists(), "a stopped grid starts nothing more"
    assert "1 stopped, 1 missing" in _state(grid, runs, capsys)

    assert subprocess.run(_command("run", grid, runs, "--processes=2"), timeout=400, check=False).returncode == 0
    assert subprocess.run(_command("run", grid, tmp_path / "straight"), timeout=400, check=False).returncode == 0
    for folder in (first, second):
        assert comparable(folder) == comparable(tmp_path / "straight" / folder.parent.name / folder.name)
        assert_events_are_monotone(folder)


def test_two_processes_never_work_the_same_run(tmp_path: Path, data_folder: Path) -> None:
    write_cell(tmp_path, data_folder, "residual")
    task = read_grid(_grid(tmp_path, "micro_residual")).tasks[0]
    folder = task.folder(tmp_path / "runs")
    with hold(folder), pytest.raises(LockedError, match=f"is written by pid {os.getpid()} on "):
        work(task, tmp_path / "runs", Stopper())
    assert not folder.path.exists(), "whoever comes too late leaves nothing"


def test_two_workers_of_one_run_leave_one_record(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker believes the folder to be free: its fit is turned away, and the status says so."""
    write_cell(tmp_path, data_folder, "residual")
    task = read_grid(_grid(tmp_path, "micro_residual")).tasks[0]
    folder = task.folder(tmp_path / "runs")
    monkeypatch.setattr("darlit.grid.worker.holder", lambda *_: None)
    with hold(folder), pytest.raises(LockedError):
        work(task, tmp_path / "runs", Stopper())
    assert [event.get("status") for event in folder.attempts()] == [None, LOCKED]
    assert f"is written by pid {os.getpid()} on " in folder.log.read_text()
    assert not folder.record.exists()
    assert read_state(task, tmp_path / "runs", {}).kind == "missing", "the attempt that came too late does not count"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot pin processes to cores")
def test_slots_divide_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 8, 9, 10})
    slots = make_slots(2, None, gpus=2)
    assert [slot.cores for slot in slots] == [(2, 3), (8, 9)]
    assert [slot.environment for slot in slots] == [
        {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in (0, 1)
    ]
    crowded = make_slots(4, 2, gpus=0)
    assert {slot.cores for slot in crowded} == {()}, "too few cores for all: none is pinned"


@pytest.mark.parametrize(
    ("listed", "gpus", "children"),
    [
        ("2,3", 2, ["2", "3", "2"]),
        ("GPU-8932f937-d72c,GPU-1f2e", 2, ["GPU-8932f937-d72c", "GPU-1f2e", "GPU-8932f937-d72c"]),
        ("MIG-GPU-8932f937/1/0, MIG-4c1e", 2, ["MIG-GPU-8932f937/1/0", "MIG-4c1e", "MIG-GPU-8932f937/1/0"]),
        ("5,3,1", 2, ["5", "3", "5"]),
    ],
)
def test_children_get_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, listed: str, gpus: int, children: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    slots = make_slots(3, 1, gpus)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == children


@pytest.mark.parametrize(
    ("listed", "visible"), [(None, 1), ("", 0), ("-1", 0), ("2,3", 2), ("0,-1,1", 1), ("NoDevFiles", 0)]
)
def test_more_gpus_than_visible_are_one_line(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    listed: str | None, visible: int,
) -> None:  # fmt: skip
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    write_cell(tmp_path, data_folder, "residual")
    grid = str(_grid(tmp_path, "micro_residual"))
    for one in ([], ["--index=0"]):
        assert main(["grid", "run", grid, f"--runs_dir={tmp_path / 'runs'}", f"--gpus={visible + 1}", *one]) == 2
        error = capsys.readouterr().err
        assert f"--gpus {visible + 1} is not allowed: " in error
        assert f" has {visible};" in error
        assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("gpus", "child"), [([], "2,GPU-1f2e"), (["--gpus=1"], "2")])
def test_one_run_of_a_grid_keeps_its_gpus(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str], child: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-1f2e")
    seen: list[dict[str, str]] = []
    monkeypatch.setattr("darlit.grid.worker._start", lambda _, variables, *__: seen.append(variables) or _Ended())
    write_cell(tmp_path, data_folder, "residual")
    main(["grid", "run", str(_grid(tmp_path, "micro_residual")), f"--runs_dir={tmp_path / 'runs'}", "--index=0", *gpus])
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in seen] == [child]


class _Ended:
    """A process that has ended."""

    def poll(self) -> int:
        return 1

    def wait(self) -> int:
        return 1


def test_an_index_outside_the_grid_is_named(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cell(tmp_path, data_folder, "residual")
    assert main(["grid", "run", str(_grid(tmp_path, "micro_residual")), "--index=1"]) == 2
    assert "--index 1 is not in" in capsys.readouterr().err
    assert main(["grid", "run", str(_grid(tmp_path, "micro_residual")), "--processes=0"]) == 2
    assert "--processes 0 is not allowed" in capsys.readouterr().err
