"""Whether runs are what their cells say today: a run is its identity, not its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from darlit.errors import DarlitError
from darlit.grid.cells import Cell, Grid, Task
from darlit.grid.runs import Run
from darlit.run import Recorded, identity_of, read_recorded
from darlit.values import dump, load


def asked(cell: Cell, seed: int, options: Sequence[str] = (), devices: int = 1) -> dict[str, Any]:
    """The identity of the run that a cell asks for; without DATA_FIELDS where its data are not on this machine.

    Args:
        cell: what would be trained.
        seed: of the run.
        options: further options of ``darlit fit``.
        devices: how many it would run on.

    Raises:
        DarlitError: ``darlit fit`` would not take the cell.
    """
    config, data = _resolve(dump(dict(cell.config)), cell.name, tuple(options))
    return identity_of({**config, "seed_everything": seed}, data, devices)


def change(cell: Cell, seed: int, recorded: Recorded, options: Sequence[str] = ()) -> str | None:
    """Return how a run differs from what its cell would train today, in one line; None: not at all.

    A cell that ``darlit fit`` would not take any more differs too. Data that are not on this machine are not compared,
    nor are the fields that a summary of version 1 lacks.

    Args:
        cell: what would be trained.
        seed: of the run.
        recorded: what was trained.
        options: further options of ``darlit fit``.
    """
    try:
        here = asked(cell, seed, options, recorded.devices)
    except DarlitError as error:
        return f"cannot be compared with {cell.source}, which darlit fit does not accept: {error}"
    changed = recorded.change(here)
    return changed and f"was trained with {changed} in {cell.source}"


def change_of(task: Task, runs_dir: Path, options: Sequence[str] = ()) -> str | None:
    """The same of the run folder of a task, where there is anything to continue or to keep."""
    folder = task.folder(runs_dir)
    recorded = folder.recorded() if folder.has_results else None
    return change(task.cell, task.seed, recorded, options) if recorded else None


def check_folders(tasks: Iterable[Task], runs_dir: Path, options: Sequence[str] = ()) -> None:
    """Raise DarlitError for the first run folder that holds another experiment than its cell says."""
    for task in tasks:
        if changed := change_of(task, runs_dir, options):
            raise _error(task.folder(runs_dir).path, changed)


def check_runs(grid: Grid, runs: Iterable[Run]) -> None:
    """Raise DarlitError for the first finished run of another experiment than its cell in the grid says."""
    cells = {cell.name: cell for cell in grid.cells}
    for run in runs:
        check_file(cells[run.summary["cell"]], run.summary["seed"], run.file)


def check_file(cell: Cell, seed: int, file: Path, options: Sequence[str] = ()) -> None:
    """Raise DarlitError where a summary is of another experiment than its cell says."""
    recorded = read_recorded(file)
    if recorded and (changed := change(cell, seed, recorded, options)):
        raise _error(file, changed)


def _error(what: Path, changed: str) -> DarlitError:
    return DarlitError(f"{what} {changed}; set it back, give the new experiment another name, or move the run away")


@cache
def _resolve(config: str, cell: str, options: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The resolved configuration of a cell, and what its data say where they are on this machine."""
    from darlit.cli import resolve  # Lightning and PyTorch come with it: only where there is a run to compare with
    from darlit.data.datamodule import TokenDataModule
    from darlit.data.vocabulary import take_vocabulary

    resolved = resolve({**load(config), "cell": cell}, options)
    try:
        take_vocabulary(resolved)
        return resolved, TokenDataModule(**resolved["data"]).identity()
    except DarlitError:
        if resolved["model"]["init_args"]["backbone"]["vocab_size"] is None:
            del resolved["model"]["init_args"]["backbone"]["vocab_size"]
        return resolved, {}
