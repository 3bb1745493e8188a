"""Keep what finished runs say: their summaries, small enough to lie beside the sources, without their checkpoints."""

from __future__ import annotations

from pathlib import Path

from darlit.atomic import write_text
from darlit.errors import DarlitError
from darlit.grid.cells import Grid, Task
from darlit.grid.summary import check_last_validation, read_summary
from darlit.grid.unchanged import check_file


def collect(grid: Grid, runs_dir: Path, out: Path, replace: bool = False) -> tuple[list[Task], int]:
    """Copy the summaries of a grid's finished runs to ``<out>/<cell>/seed_<n>.json``.

    Args:
        grid: whose runs.
        runs_dir: where run folders lie.
        out: where the copies go.
        replace: overwrite the summary of another run of the same cell and seed.

    Returns:
        The tasks that were copied, and how many of the grid's were there already.

    Raises:
        DarlitError: a summary that cannot be read, or one of another experiment than its cell is,
            or one that would replace another run's; then nothing is copied.
    """
    copied: list[Task] = []
    kept = 0
    for task in grid.tasks:
        source, target = task.folder(runs_dir).summary, kept_summary(task, out)
        if not source.is_file():
            kept += target.is_file()
            continue
        check_last_validation(read_summary(source), source)
        check_file(task.cell, task.seed, source)
        if not target.is_file():
            copied.append(task)
        elif target.read_bytes() == source.read_bytes():
            kept += 1
        elif replace:
            copied.append(task)
        else:
            raise DarlitError(
                f"{target} is of another run than {source}; a run is not repeated for its value: keep the first, "
                "or say what was wrong with it and add --replace"
            )
    for task in copied:
        write_text(kept_summary(task, out), task.folder(runs_dir).summary.read_text(encoding="utf-8"))
    return copied, kept


def kept_summary(task: Task, out: Path) -> Path:
    """Where a run's summary lies among collected ones."""
    return out / task.cell.name / f"seed_{task.seed}.json"
