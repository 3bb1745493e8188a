"""A grid file names groups of cells x seeds x budget; read, it is a numbered list of tasks, one run each.

::

    groups:
      tiny:
        cells: [tiny_residual, tiny_dar_full]   # experiment files beside the grid file or one folder above
        seeds: [0, 1, 2]
        budget: {tokens: 4_000_000}             # optional, on top of each cell's own
        varies: [optimizer.learning_rate]       # optional: what is compared, so that cells may disagree on it
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darlit import run
from darlit.errors import DarlitError, nearest
from darlit.experiment import ExperimentError, load_experiment, merge, shortened
from darlit.fields import convert_fields
from darlit.modules.budget import Budget
from darlit.settings import complete, is_seed

_GROUP_KEYS = ("cells", "seeds", "budget", "varies")
# Names become folders, job names and array comments: nothing in them can mean anything to a shell.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Cell(run.Cell):
    """One experiment: its file, and the file's content with its bases and the group's budget merged in."""

    file: Path
    budget: Mapping[str, Any]  # what the group puts on top of the file
    config: Mapping[str, Any]
    seeds: tuple[int, ...]
    group: str
    varies: tuple[str, ...]  # fields of the equal-budget check that the cells of the group may disagree on

    def settings(self) -> dict[str, Any]:
        """Return the content by its types, with what it leaves out at its default.

        Raises:
            ExperimentError: a key that is not known or a value that is not allowed; names the file.
        """
        try:
            return complete(self.config)
        except DarlitError as error:
            raise ExperimentError(f"{self.file}: {error}") from error


@dataclass(frozen=True)
class Task:
    """One run to do: a cell under a seed. ``index`` is what a Slurm array selects."""

    index: int
    cell: Cell
    seed: int

    def folder(self, runs_dir: Path) -> run.RunFolder:
        """The run's only folder."""
        return run.RunFolder.of(runs_dir, self.cell.name, self.seed)


@dataclass(frozen=True)
class Grid:
    """A grid file, read."""

    name: str
    file: Path
    cells: tuple[Cell, ...]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All runs in array order: a cell's seeds follow one another."""
        pairs = [(cell, seed) for cell in self.cells for seed in cell.seeds]
        return tuple(Task(index, cell, seed) for index, (cell, seed) in enumerate(pairs))


def read_grid(path: str | Path) -> Grid:
    """Read a grid file and every experiment it names.

    Raises:
        ExperimentError: a file that is missing or malformed, a name that is not safe, or a cell named twice.
    """
    path = Path(path)
    _check_name(path, "grid", path.stem)
    content = load_experiment(path)
    groups = content.get("groups")
    if set(content) != {"groups"} or not isinstance(groups, dict) or not groups:
        raise ExperimentError(
            f"{path}: a grid file holds one key, 'groups', a mapping of names; found {', '.join(map(str, content))}"
        )
    cells: dict[str, Cell] = {}
    for name, group in groups.items():
        for cell in _read_group(path, str(name), group):
            if cell.name in cells:
                raise ExperimentError(f"{path}: cell '{cell.name}' is named twice; a cell has one group and one budget")
            cells[cell.name] = cell
    return Grid(path.stem, path, tuple(cells.values()))


def _read_group(path: Path, name: str, group: Any) -> list[Cell]:
    where = f"{path}: group '{name}'"
    if not isinstance(group, dict) or not {"cells", "seeds"} <= set(group):
        raise ExperimentError(f"{where} needs 'cells' and 'seeds' and may have 'budget' and 'varies', nothing else")
    for key in group:
        if key not in _GROUP_KEYS:
            raise ExperimentError(f"{where} has no key {key!r}; {nearest(str(key), _GROUP_KEYS)}")
    names, seeds, budget, varies = group["cells"], group["seeds"], group.get("budget") or {}, group.get("varies") or []
    if not isinstance(names, list) or not names or not all(isinstance(cell, str) for cell in names):
        raise ExperimentError(f"{where}: cells must be a list of experiment names, not {names!r}")
    if not isinstance(seeds, list) or not seeds or not all(is_seed(seed) for seed in seeds):
        raise ExperimentError(f"{where}: seeds must be a list of whole numbers from 0, not {seeds!r}")
    if len(set(seeds)) != len(seeds):
        raise ExperimentError(f"{where}: seeds {seeds!r} holds a seed twice; name each once")
    if not isinstance(budget, dict):
        raise ExperimentError(f"{where}: budget must be a mapping such as {{tokens: 1000000}}, not {budget!r}")
    try:
        budget = convert_fields("budget", budget, Budget)
    except DarlitError as error:
        raise ExperimentError(f"{where}: {error}") from error
    if not isinstance(varies, list) or not all(isinstance(field, str) for field in varies):
        raise ExperimentError(f"{where}: varies must be a list such as [optimizer.learning_rate], not {varies!r}")
    return [_read_cell(path, cell, seeds, budget, name, varies) for cell in names]


def _read_cell(path: Path, name: str, seeds: list[int], budget: dict[str, Any], group: str, varies: list[str]) -> Cell:
    _check_name(path, "cell", name)
    candidates = [path.parent / f"{name}.yaml", path.parent.parent / f"{name}.yaml"]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise ExperimentError(f"{path}: cell '{name}' has no file: neither {candidates[0]} nor {candidates[1]} exists")
    config = load_experiment(file)
    content = shortened(merge(config, {"budget": budget} if budget else {}), str(file))
    budget = {key: content["budget"][key] for key in budget}
    return Cell(name, file, budget, content, tuple(seeds), group, tuple(varies))


def _check_name(path: Path, kind: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise ExperimentError(
            f"{str(path)!r}: {kind} name {name!r} is not allowed; use letters, digits, '.', '_' and '-' only"
        )
