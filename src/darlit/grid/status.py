"""How far each task of a grid is, read from its run folder (and from squeue where tasks wait there)."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from darlit.grid.cells import Grid, Task
from darlit.grid.summary import SummaryError, check_last_validation, read_summary
from darlit.grid.unchanged import change_of
from darlit.run import INTERRUPTED, LOCKED, WORKER_LOCK, RunFolder, holder

_STYLES = {
    "done": "green",
    "running": "cyan",
    "queued": "blue",
    "stopped": "yellow",
    "failed": "red",
    "changed": "magenta",
    "missing": "dim",
}
_TAIL_BYTES = 8192
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class State:
    """``kind`` is a key of the styles above; ``detail`` says more in one line."""

    task: Task
    kind: str
    detail: str


def read_state(task: Task, runs_dir: Path, queue: Mapping[tuple[str, int], str]) -> State:
    """Return a task's state.

    Args:
        task: which run.
        runs_dir: where run folders lie.
        queue: what Slurm says of tasks that wait there, by cell and seed.
    """
    folder = task.folder(runs_dir)
    waits = queue.get((task.cell.name, task.seed))
    progress = _progress(folder)
    if holder(folder) or holder(folder, WORKER_LOCK):
        return State(task, "running", _running(progress))
    if (kind := _done(folder) if folder.is_done else None) is not None and kind[0] == "failed":
        return State(task, *kind)
    if changed := change_of(task, runs_dir):
        return State(task, "changed", changed)
    if kind is not None:
        return State(task, *kind)
    if waits is not None:
        return State(task, "queued", waits)
    events = folder.attempts()
    while events and events[-1].get("status") == LOCKED:  # it came too late, and left the run to another process
        events = events[:-2]
    if not events:
        return State(task, "stopped", _at(progress)) if progress else State(task, "missing", "")
    last = events[-1]
    if last["event"] == "start":
        return State(task, "failed", f"killed, or its node died, {_at(progress)}: {last_line(folder.log)}")
    if last["status"] == INTERRUPTED:
        return State(task, "stopped", f"by {last['signal'] or 'a signal'} {_at(progress)}; run or submit to continue")
    return State(task, "failed", f"{_reason(last['exit_code'])}: {last_line(folder.log)}")


def status_table(grid: Grid, runs_dir: Path, queue: Mapping[tuple[str, int], str]) -> tuple[Table, dict[str, int]]:
    """Return the table of all tasks and how many are in each state."""
    states = [read_state(task, runs_dir, queue) for task in grid.tasks]
    counts = {kind: sum(state.kind == kind for state in states) for kind in _STYLES}
    table = Table(title=f"grid {grid.name}", title_justify="left", title_style="bold")
    for heading in ("#", "cell", "seed", "state", ""):
        table.add_column(heading, justify="right" if heading in ("#", "seed") else "left")
    for state in states:
        kind = f"[{_STYLES[state.kind]}]{state.kind}[/]"
        task = state.task
        table.add_row(str(task.index), task.cell.name, str(task.seed), kind, state.detail.replace("[", "\\["))
    table.caption = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    table.caption_justify = "left"
    return table, counts


def last_line(log: Path) -> str:
    """Return the last line of a log that holds anything, without control characters."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return "no log"
    lines = [_CONTROL.sub("", line).strip() for line in text.replace("\r", "\n").split("\n")]
    return next((line for line in reversed(lines) if line), "an empty log")


def _done(folder: RunFolder) -> tuple[str, str]:
    try:
        summary = read_summary(folder.summary)
        check_last_validation(summary, folder.summary)
    except SummaryError as error:
        return "failed", str(error)
    return "done", f"val loss {summary['val_loss_final']:.4f} in {_duration(summary['wall_time_s'])}"


def _running(progress: Mapping[str, Any]) -> str:
    if not progress:
        return "starting"
    parts = [_at(progress)]
    if progress["loss"] is not None:
        parts.append(f"loss {progress['loss']:.3f}")
    if progress["tokens_per_second"]:
        parts.append(f"{progress['tokens_per_second']:,.0f} tokens/s")
    if progress["seconds_left"] is not None:
        parts.append(f"{_duration(progress['seconds_left'])} left")
    return ", ".join(parts)


def _at(progress: Mapping[str, Any]) -> str:
    return f"at step {progress['step']:,} of {progress['max_steps']:,}" if progress else "before its first step"


def _reason(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _progress(folder: RunFolder) -> dict[str, Any]:
    try:
        return json.loads(folder.progress.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
