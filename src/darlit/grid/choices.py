"""Tables to choose a setting by: the cells of each group of a grid against the group's first, paired over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from darlit.grid.cells import Cell, Grid
from darlit.grid.equal_budget import check_runs_of
from darlit.grid.runs import find_runs
from darlit.grid.statistics import Interval, mean, paired_interval, standard_deviation
from darlit.grid.summary import Summary, check_last_validation, last_validation
from darlit.grid.table import interval_text
from darlit.grid.unchanged import check_runs
from darlit.run import flatten


@dataclass(frozen=True)
class Choice:
    """One cell of a group; losses in nats per token, ``None`` where a number cannot be known."""

    cell: Cell
    change: str
    seeds: int
    loss: float | None = None
    loss_sd: float | None = None
    difference: float | None = None
    interval: Interval | None = None
    lower: int = 0
    pairs: int = 0
    partial: str | None = None
    """At which step it was validated last, where that is not its last one."""


def compare(grid: Grid, runs_dir: Path, partial: bool = False) -> dict[str, list[Choice]]:
    """Return every group's cells against its first one, on the grid's seeds that both have finished.

    Args:
        grid: what was asked.
        runs_dir: folder of runs, or of collected summaries.
        partial: take runs too whose last validation came before their last step.

    Raises:
        DarlitError: summaries that cannot be read, or that differ in more than the grid compares.
    """
    asked = {cell.name: cell.seeds for cell in grid.cells}
    found, _ = find_runs(runs_dir)
    finished = [run for run in found if run.summary["seed"] in asked.get(run.summary["cell"], ())]
    for run in finished if not partial else ():
        check_last_validation(run.summary, run.file)
    check_runs(grid, finished)
    check_runs_of(grid, finished)
    by_cell: dict[str, dict[int, Summary]] = {name: {} for name in asked}
    for run in finished:
        by_cell[run.summary["cell"]][run.summary["seed"]] = run.summary
    groups: dict[str, list[Choice]] = {}
    for group, of_group in groupby(grid.cells, key=lambda cell: cell.group):
        cells = list(of_group)
        first = by_cell[cells[0].name]
        groups[group] = [_choice(cell, by_cell[cell.name], first) for cell in cells]
    return groups


def _choice(cell: Cell, runs: Mapping[int, Summary], first: Mapping[int, Summary]) -> Choice:
    if not runs:
        return Choice(cell, "?", 0)
    losses = [run["val_loss_final"] for run in runs.values()]
    pairs = [run["val_loss_final"] - first[seed]["val_loss_final"] for seed, run in runs.items() if seed in first]
    against = pairs if runs is not first else []
    return Choice(
        cell,
        _change(next(iter(runs.values())), next(iter(first.values()), None)),
        len(runs),
        mean(losses),
        standard_deviation(losses),
        mean(against) if against else None,
        paired_interval(against) if against else None,
        sum(pair < 0 for pair in against),
        len(against),
        next((at for at in map(last_validation, runs.values()) if at), None),
    )


def _change(run: Summary, first: Summary | None) -> str:
    """What a run has otherwise than the group's first, as its summary says it."""
    if first is None or run["cell"] == first["cell"]:
        return "—"
    ours, theirs = _settings(run), _settings(first)
    return ", ".join(f"{name} = {value}" for name, value in ours.items() if theirs.get(name) != value)


def _settings(run: Summary) -> dict[str, object]:
    return flatten("pathway", run["pathway"]) | flatten("optimizer", run["optimizer"])


def markdown(groups: Mapping[str, Sequence[Choice]]) -> str:
    """Return one Markdown table a group, each with its heading."""
    return "\n".join(_table(group, rows) for group, rows in groups.items())


def _table(group: str, rows: Sequence[Choice]) -> str:
    lines = [
        f"**{group}**",
        "",
        "| cell | change | n | val loss | paired Δ [95 %] | lower in |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        asked = len(row.cell.seeds)
        count = f"{row.seeds}" if row.seeds == asked else f"{row.seeds} of {asked}"
        spread = "" if row.loss_sd is None else f" ± {row.loss_sd:.4f}"
        loss = "—" if row.loss is None else f"{row.loss:.4f}{spread}" + (f" ({row.partial})" if row.partial else "")
        lower = f"{row.lower} of {row.pairs}" if row.pairs else "—"
        difference = interval_text(row.difference, row.interval)
        lines.append(f"| {row.cell.arm} | {row.change} | {count} | {loss} | {difference} | {lower} |")
    return "\n".join(lines) + "\n"
