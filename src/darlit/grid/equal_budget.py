"""The equal-budget check: cells of one comparison agree on everything except the pathway, or are refused.

It runs on experiment files before a submission and on summaries before a table is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from darlit.errors import DarlitError
from darlit.grid.cells import Cell, Grid
from darlit.grid.runs import Run, arm_order, size_order
from darlit.grid.summary import EQUAL_FIELDS, field_value
from darlit.run import UNSET, flatten


class UnequalBudgetError(DarlitError):
    """Two members of one comparison disagree; the message names the field, both values and both files."""


@dataclass(frozen=True)
class Member:
    """One side of a comparison: a file, and what the others of its group must agree with, by field name."""

    file: str
    fields: Mapping[str, Any]


def check_equal(group: str, members: Sequence[Member]) -> None:
    """Raise :class:`UnequalBudgetError` at the first field on which a member differs from the first one."""
    for member in members[1:]:
        _refuse_difference(group, members[0], member)


def check_runs(runs: Iterable[Run]) -> dict[str, dict[str, list[Run]]]:
    """Group finished runs by size and cell, each cell's runs by seed, and check that every size is one comparison.

    Raises:
        UnequalBudgetError: unequal budgets within a size, unequal pathways within a cell, or two arms without a
            common seed.
    """
    sizes: dict[str, dict[str, list[Run]]] = {}
    ordered = sorted(runs, key=_order)
    for size, of_size in groupby(ordered, key=lambda run: run.summary["size"]):
        members = list(of_size)
        check_equal(f"size {size}", [_run_member(run) for run in members])
        check_equal(f"size {size}", _identities(members))
        cells = {cell: list(group) for cell, group in groupby(members, key=lambda run: run.summary["cell"])}
        for cell, of_cell in cells.items():
            check_equal(
                f"cell {cell}", [Member(str(run.file), flatten("pathway", run.summary["pathway"])) for run in of_cell]
            )
        _check_seeds(size, list(cells.values()))
        sizes[size] = cells
    return sizes


def check_runs_of(grid: Grid, runs: Iterable[Run]) -> None:
    """Check the finished runs of a grid, but for what its groups compare.

    Raises:
        UnequalBudgetError: two runs of a size disagree on another field, or two of a cell on their pathway.
    """
    varies = {cell.name: cell.varies for cell in grid.cells}
    for size, of_size in groupby(sorted(runs, key=_order), key=lambda run: run.summary["size"]):
        members = list(of_size)
        for _, of_cell in groupby(members, key=lambda run: run.summary["cell"]):
            same = [(_run_member(run), flatten("pathway", run.summary["pathway"])) for run in of_cell]
            check_equal(f"size {size}", [Member(run.file, {**run.fields, **pathway}) for run, pathway in same])
        found = [(_run_member(run), varies.get(run.summary["cell"], ())) for run in members]
        check_equal(f"size {size}", [Member(run.file, _without(run.fields, free)) for run, free in found])
        check_equal(f"size {size}", _identities(members, varies))


def _order(run: Run) -> tuple[tuple[int, str], tuple[int, str], str, int]:
    summary = run.summary
    return size_order(summary["size"]), arm_order(summary["arm"]), summary["cell"], summary["seed"]


def _run_member(run: Run) -> Member:
    fields: dict[str, Any] = {}
    for name, path in EQUAL_FIELDS.items():
        fields |= flatten(name, field_value(run.summary, path))
    return Member(str(run.file), fields)


def _identities(runs: Sequence[Run], varies: Mapping[str, Sequence[str]] | None = None) -> list[Member]:
    """Every field of the identities except pathway, seed and what a cell varies; summaries of version 1 have none."""
    members = []
    for run in runs:
        fields = {
            _NAMES.get(field, field): value
            for field, value in run.summary["identity"].items()
            if field.partition(".")[0] not in ("model", "pathway", "seed_everything")
        }
        if fields:
            members.append(Member(str(run.file), _without(fields, (varies or {}).get(run.summary["cell"], ()))))
    return members


# An experiment's keys under the names that refusals of summaries use too; other keys keep their own.
_NAMES = {
    "budget.tokens": "tokens",
    "budget.batch_tokens": "batch in tokens",
    "data.sequence_length": "sequence length",
    "data.tokenizer": "tokenizer",
    "data.val_sequences": "validation sequences",
    "trainer.limit_val_batches": "validation batches",
    "trainer.precision": "precision",
}
# What an arm is, where it runs, and what a grid decides for every run.
_MAY_DIFFER = (
    *("model.class_path", "model.init_args.pathway", "cell", "runs_dir", "overwrite", "seed_everything"),
    *(f"trainer.{key}" for key in ("accelerator", "devices", "num_nodes", "strategy", "logger", "callbacks")),
)


def _cell_member(cell: Cell) -> Member:
    """What the cell's file says on each field, but for those that its group compares."""
    fields: dict[str, Any] = {"seeds": list(cell.seeds)}
    for part, content in cell.settings().items():
        for key, value in flatten(part, content).items():
            if not any(key == free or key.startswith(f"{free}.") for free in _MAY_DIFFER):
                fields[_NAMES.get(key, key.removeprefix("model.init_args."))] = value
    return Member(cell.source, _without(fields, cell.varies))


def _without(fields: Mapping[str, Any], varies: Sequence[str]) -> dict[str, Any]:
    free = {_NAMES.get(field, field) for field in varies}
    return {field: value for field, value in fields.items() if field not in free}


def _check_seeds(size: str, cells: list[list[Run]]) -> None:
    """Rows may lack seeds, and are marked; two arms that share none cannot be compared at all."""
    first = cells[0]
    seeds = {run.summary["seed"] for run in first}
    for other in cells[1:]:
        others = {run.summary["seed"] for run in other}
        if not seeds & others:
            raise UnequalBudgetError(
                f"size {size}: seeds differ: {sorted(seeds)} in {first[0].file}, {sorted(others)} in {other[0].file}; "
                "compare runs of the same seeds: train the missing ones or move one cell to another runs folder"
            )


def _refuse_difference(group: str, first: Member, other: Member) -> None:
    for field in [*first.fields, *(name for name in other.fields if name not in first.fields)]:
        ours, theirs = first.fields.get(field, UNSET), other.fields.get(field, UNSET)
        if ours != theirs or isinstance(ours, bool) != isinstance(theirs, bool):
            raise UnequalBudgetError(
                f"{group}: {field} differs: {ours!r} in {first.file}, {theirs!r} in {other.file}; "
                "compare cells of one budget: change one of the two, or keep them in different groups"
            )


def check_grid(grid: Grid) -> dict[str, list[Cell]]:
    """Group a grid's cells by size and check, from their experiment files, that every size is one comparison.

    Raises:
        UnequalBudgetError: two cells of a size disagree on anything but the pathway and where they run.
    """
    sizes: dict[str, list[Cell]] = {}
    for cell in grid.cells:
        sizes.setdefault(cell.size, []).append(cell)
    for size, cells in sizes.items():
        check_equal(f"size {size}", [_cell_member(cell) for cell in cells])
    return sizes
