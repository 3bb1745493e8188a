"""A grid file names groups of cells x seeds x budget; read, it is a numbered list of tasks, one run each.

::

    groups:
      tiny:
        size: tiny                              # configs/size/tiny.yaml
        arms: [residual, dar_full]              # configs/arm/: the cells tiny_residual and tiny_dar_full
        seeds: [0, 1, 2]
        budget: {tokens: 4_000_000}             # optional, on top of the size's
        set: {data.holdout: screening}          # optional, fields of every cell
        vary:                                   # optional, one variation at a time: tiny_dar_full-lr_3 and so on
          default: {}
          lr_3: {optimizer.pathway_lr_multiplier: 3.0}
      mine:
        cells: [tiny_mine]                      # experiment files beside the grid file or one folder above
        seeds: [0, 1, 2]
        varies: [optimizer.learning_rate]       # optional: what is compared, so that cells may disagree on it

Fields are named as in refusals: ``optimizer.``, ``pathway.`` and ``backbone.`` are those of ``model.init_args``.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from darlit import run
from darlit.catalog import cell_files
from darlit.errors import DarlitError, nearest
from darlit.experiment import ExperimentError, load_experiment, load_parts, nested, shortened
from darlit.fields import convert_fields
from darlit.modules.budget import Budget
from darlit.settings import complete, is_seed

_GROUP_GROUP_KEYS = ("size", "arms", "cells", "seeds", "budget", "set", "vary", "varies")
# Names become folders, job names and array comments: nothing in them can mean anything to a shell.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Cell(run.Cell):
    """One experiment: its files, later ones on top, and their content with the changes of the group merged in."""

    files: tuple[Path, ...]
    changes: Mapping[str, Any]  # what the group puts on top of the files, by dotted name
    config: Mapping[str, Any]
    seeds: tuple[int, ...]
    group: str
    varies: tuple[str, ...]  # fields of the equal-budget check that the cells of the grid may disagree on

    @property
    def source(self) -> str:
        """Its files, as lists and errors name them."""
        return " + ".join(map(str, self.files))

    @property
    def options(self) -> list[str]:
        """The options of ``darlit fit`` that make this cell."""
        changes = [f"--{name}={_as_option(value)}" for name, value in self.changes.items()]
        return [*(f"--config={file}" for file in self.files), f"--cell={self.name}", *changes]

    def settings(self) -> dict[str, Any]:
        """Return the content by its types, with what it leaves out at its default.

        Raises:
            ExperimentError: a key that is not known or a value that is not allowed; names the file.
        """
        try:
            return complete(self.config)
        except DarlitError as error:
            raise ExperimentError(f"{self.source}: {error}") from error


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


def read_grid(path: str | Path, only: Sequence[str] = ()) -> Grid:
    """Read a grid file and every experiment it names.

    Args:
        path: the grid file.
        only: names of cells, or patterns such as ``dense1b_*``; the grid then has only these, numbered from 0.

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
    compared = tuple(dict.fromkeys(field for cell in cells.values() for field in cell.varies))
    for pattern in only:
        if not fnmatch.filter(cells, pattern):
            raise ExperimentError(f"{path}: no cell is named '{pattern}'; its cells are {', '.join(cells)}")
    chosen = [cell for cell in cells.values() if not only or any(fnmatch.fnmatch(cell.name, name) for name in only)]
    return Grid(path.stem, path, tuple(replace(cell, varies=compared) for cell in chosen))


def catalog_cell(name: str) -> Cell:
    """The cell ``<size>_<arm>`` as it is, under seed 0."""
    files = _short(cell_files(name))
    return Cell(name, files, {}, load_parts(files), (0,), group="", varies=())


_GROUP_KEYS = ("size", "arms", "cells", "seeds", "budget", "set", "vary", "varies")
_PARTS = ("optimizer", "pathway", "backbone")


def _read_group(path: Path, name: str, group: Any) -> list[Cell]:
    where = f"{path}: group '{name}'"
    if not isinstance(group, dict) or "seeds" not in group or not {"arms", "cells"} & set(group):
        raise ExperimentError(f"{where} needs 'seeds', and 'size' and 'arms' or 'cells'")
    for key in group:
        if key not in _GROUP_KEYS:
            raise ExperimentError(f"{where} has no key {key!r}; {nearest(str(key), _GROUP_KEYS)}")
    seeds, varies = group["seeds"], group.get("varies") or []
    if not isinstance(seeds, list) or not seeds or not all(is_seed(seed) for seed in seeds):
        raise ExperimentError(f"{where}: seeds must be a list of whole numbers from 0, not {seeds!r}")
    if len(set(seeds)) != len(seeds):
        raise ExperimentError(f"{where}: seeds {seeds!r} holds a seed twice; name each once")
    budget = group.get("budget") or {}
    if not isinstance(budget, dict):
        raise ExperimentError(f"{where}: budget must be a mapping such as {{tokens: 1000000}}, not {budget!r}")
    try:
        budget = convert_fields("budget", budget, Budget)
    except DarlitError as error:
        raise ExperimentError(f"{where}: {error}") from error
    if not isinstance(varies, list) or not all(isinstance(field, str) for field in varies):
        raise ExperimentError(f"{where}: varies must be a list such as [optimizer.learning_rate], not {varies!r}")
    shared = {**_fields(where, "set", group.get("set")), **{f"budget.{key}": budget[key] for key in budget}}
    variations = _variations(where, group)
    varies = [*varies, *(name.removeprefix("model.init_args.") for _, fields in variations for name in fields)]

    cells: list[Cell] = []
    for cell, files in _named_files(path, where, group):
        for variation, fields in variations:
            full = f"{cell}-{variation}" if variation else cell
            _check_name(path, "cell", full)
            changes = {**shared, **fields}
            config = shortened(load_parts(files, nested(changes)), f"{where}: cell '{full}'")
            changes |= {f"budget.{key}": config["budget"][key] for key in budget}
            cells.append(Cell(full, _short(files), changes, config, tuple(seeds), name, tuple(varies)))
    return cells


def _variations(where: str, group: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and changed fields of the one-at-a-time variations; one without a name where there are none."""
    vary = group.get("vary")
    if vary is None:
        return [("", {})]
    if not isinstance(vary, dict) or not vary or not all(isinstance(name, str) for name in vary):
        raise ExperimentError(f"{where}: vary names variations, such as {{lr_3: {{optimizer.learning_rate: 3e-3}}}}")
    return [(name, _fields(where, "vary", fields)) for name, fields in vary.items()]


def _fields(where: str, key: str, fields: Any) -> dict[str, Any]:
    """Changed fields by the names that the command line has for them."""
    fields = {} if fields is None else fields
    if not isinstance(fields, dict) or not all(isinstance(field, str) and "." in field for field in fields):
        raise ExperimentError(
            f"{where}: {key} maps fields to values, such as {{data.holdout: screening}}, not {fields!r}"
        )
    return {
        f"model.init_args.{field}" if field.partition(".")[0] in _PARTS else field: value
        for field, value in fields.items()
    }


def _named_files(path: Path, where: str, group: dict[str, Any]) -> list[tuple[str, tuple[Path, ...]]]:
    """The cells that a group names, and their files."""
    size, arms, cells = group.get("size"), group.get("arms", []), group.get("cells", [])
    for key, names in (("arms", arms), ("cells", cells)):
        if not isinstance(names, list) or (key in group and not names) or not all(isinstance(n, str) for n in names):
            raise ExperimentError(f"{where}: {key} must be a list of names, not {names!r}")
    if (arms or size is not None) and not (arms and isinstance(size, str)):
        raise ExperimentError(f"{where}: size and arms go together, such as {{size: tiny, arms: [residual, dar_full]}}")
    found: list[tuple[str, tuple[Path, ...]]] = []
    for arm in arms:
        _check_name(path, "cell", f"{size}_{arm}")
        found.append((f"{size}_{arm}", cell_files(f"{size}_{arm}", near=path.parent)))
    for cell in cells:
        _check_name(path, "cell", cell)
        candidates = [path.parent / f"{cell}.yaml", path.parent.parent / f"{cell}.yaml"]
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            raise ExperimentError(
                f"{path}: cell '{cell}' has no file: neither {candidates[0]} nor {candidates[1]} exists; "
                "cells of configs/ are written as size and arms"
            )
        found.append((cell, (file,)))
    return found


def _short(files: Sequence[Path]) -> tuple[Path, ...]:
    """Paths relative to the working folder where they are below it."""
    here = Path.cwd()
    return tuple(file.relative_to(here) if file.is_relative_to(here) else file for file in files)


def _as_option(value: Any) -> str:
    """A value as the command line reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def _check_name(path: Path, kind: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise ExperimentError(
            f"{str(path)!r}: {kind} name {name!r} is not allowed; use letters, digits, '.', '_' and '-' only"
        )
