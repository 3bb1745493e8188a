"""What ``darlit grid status`` says of every kind of run folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from darlit.grid.cells import Task, read_grid
from darlit.grid.status import last_line, read_state, status_table
from darlit.run import WORKER_LOCK, RunFolder, hold
from grid.fakes import make_summary, write_cell_file, write_run

PROGRESS = {
    "step": 120, "max_steps": 500, "tokens": 245760, "loss": 2.5, "tokens_per_second": 1234.0, "seconds_left": 3725.0,
    "updated": 0.0, "pid": 1,
}  # fmt: skip


@pytest.fixture
def task(tmp_path: Path) -> Task:
    write_cell_file(tmp_path, "tiny_residual")
    grid = tmp_path / "grid.yaml"
    grid.write_text(yaml.safe_dump({"groups": {"tiny": {"cells": ["tiny_residual"], "seeds": [0]}}}))
    return read_grid(grid).tasks[0]


def _folder(task: Task, tmp_path: Path, *events: dict[str, Any], log: str = "", **progress: Any) -> Path:
    folder = task.folder(tmp_path / "runs").path
    folder.mkdir(parents=True)
    (folder / "attempts.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if progress:
        (folder / "progress.json").write_text(json.dumps({**PROGRESS, **progress}))
    (folder / "log.txt").write_text(log)
    return folder


def _state(task: Task, tmp_path: Path, queue: str | None = None) -> tuple[str, str]:
    waiting = {} if queue is None else {("tiny_residual", 0): queue}
    state = read_state(task, tmp_path / "runs", waiting)
    return state.kind, state.detail


START = {"event": "start", "time": 1.0}


def test_missing(task: Task, tmp_path: Path) -> None:
    assert _state(task, tmp_path) == ("missing", "")


def test_queued(task: Task, tmp_path: Path) -> None:
    assert _state(task, tmp_path, queue="pending in Slurm") == ("queued", "pending in Slurm")


def test_done(task: Task, tmp_path: Path) -> None:
    write_run(tmp_path / "runs", make_summary("tiny", "residual", 0, wall_time_s=93.0))
    assert _state(task, tmp_path, queue="running in Slurm") == ("done", "val loss 2.0000 in 1 min 33 s")


def test_a_summary_that_cannot_be_read_is_a_failure(task: Task, tmp_path: Path) -> None:
    (_folder(task, tmp_path) / "summary.json").write_text("{}")
    kind, detail = _state(task, tmp_path)
    assert kind == "failed"
    assert "schema_version" in detail


def test_running_with_progress_and_time_left(task: Task, tmp_path: Path) -> None:
    with hold(RunFolder(_folder(task, tmp_path, START, updated=time.time())), WORKER_LOCK):
        assert _state(task, tmp_path, queue="running in Slurm") == (
            "running", "at step 120 of 500, loss 2.500, 1,234 tokens/s, 1 h 2 min left",
        )  # fmt: skip


def test_running_before_the_first_step(task: Task, tmp_path: Path) -> None:
    with hold(RunFolder(_folder(task, tmp_path, START))):
        assert _state(task, tmp_path) == ("running", "starting")


def test_a_fit_by_hand_runs_while_it_holds_the_lock(task: Task, tmp_path: Path) -> None:
    with hold(RunFolder(_folder(task, tmp_path, updated=time.time() - 3600))):
        assert _state(task, tmp_path)[0] == "running"


def test_a_fit_by_hand_has_stopped_however_fresh_its_progress_is(task: Task, tmp_path: Path) -> None:
    _folder(task, tmp_path, updated=time.time())
    assert _state(task, tmp_path) == ("stopped", "at step 120 of 500")


def test_stopped_by_a_signal(task: Task, tmp_path: Path) -> None:
    end = {"event": "end", "status": 75, "exit_code": 75, "signal": "SIGUSR1"}
    _folder(task, tmp_path, START, end, updated=time.time())
    assert _state(task, tmp_path) == ("stopped", "by SIGUSR1 at step 120 of 500; run or submit to continue")


@pytest.mark.parametrize(
    ("code", "reason"), [(2, "exit status 2"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_failed_with_the_reason_and_the_last_line(task: Task, tmp_path: Path, code: int, reason: str) -> None:
    end = {"event": "end", "status": 76, "exit_code": code, "signal": None}
    _folder(task, tmp_path, START, end, log="step 1\n\x1b[31mOutOfMemoryError: [CUDA]\x1b[0m\r\n\n")
    assert _state(task, tmp_path) == ("failed", f"{reason}: OutOfMemoryError: [CUDA]")


def test_killed_without_a_word(task: Task, tmp_path: Path) -> None:
    _folder(task, tmp_path, START, log="step 1\n", updated=time.time())
    assert _state(task, tmp_path) == ("failed", "killed, or its node died, at step 120 of 500: step 1")


def test_a_record_cut_off_by_a_crash_is_read_up_to_there(task: Task, tmp_path: Path) -> None:
    folder = _folder(task, tmp_path, START, log="step 1\n")
    with (folder / "attempts.jsonl").open("a") as file:
        file.write('{"event": "en')
    assert _state(task, tmp_path)[0] == "failed"


def test_the_last_line_of_an_empty_or_missing_log(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none") == "no log"
    (tmp_path / "log").write_text("\n \n")
    assert last_line(tmp_path / "log") == "an empty log"


def test_the_table_counts_every_kind(task: Task, tmp_path: Path) -> None:
    _, counts = status_table(read_grid(tmp_path / "grid.yaml"), tmp_path / "runs", {})
    assert counts == {"done": 0, "running": 0, "queued": 0, "stopped": 0, "failed": 0, "changed": 0, "missing": 1}
