"""``darlit results``: finished runs become one table a size, its figures, and ``results/README.md``.

The equal-budget check runs first; nothing is written if it refuses. The same runs give the same bytes. A person's
notes are in ``notes.md`` of the output folder, findings of `darlit analyze` in its ``analysis/``; both become a part of
the page. A page with rows of other runs is only replaced with ``--overwrite``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from darlit.arguments import Parser
from darlit.atomic import write_text
from darlit.grid.cells import Grid, read_grid
from darlit.grid.comparison import Comparison, compare
from darlit.grid.equal_budget import check_runs
from darlit.grid.figures import write_figures
from darlit.grid.report import HEAD, Section, readme
from darlit.grid.runs import Run, find_runs, size_order
from darlit.grid.summary import SummaryError, check_last_validation, without_timing
from darlit.grid.table import comma_separated, latex, markdown, show
from darlit.grid.unchanged import check_runs as check_grid_runs
from darlit.markers import markers, replace_between

_NAME = "darlit results"


def main(argv: list[str]) -> int:
    """Run the verb and return 0; runs that cannot become one table raise a one-line :class:`DarlitError`."""
    arguments = _parser().parse_args(argv)
    return _results(arguments, read_grid(arguments.grid) if arguments.grid else None)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=_NAME, description="Check finished runs for equal budgets and write their table and figures.")
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--out", type=Path, help="where to write (default: results/ in the folder of runs)")
    parser.add_argument("--grid", type=Path, help="grid file whose cells and seeds the table should hold")
    parser.add_argument(
        "--figures", choices=("none", "png", "svg"), default="png", help="svg writes both kinds (default: png)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a page that has rows of other runs")
    between = " and ".join(markers(_NAME))
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help=f"write the short tables into this page too, between {between}"
    )
    return parser


def _results(arguments: argparse.Namespace, grid: Grid | None) -> int:
    runs_dir, figures = arguments.runs, arguments.figures
    out = arguments.out or runs_dir / "results"
    finished, unfinished = find_runs(runs_dir)
    asked = _asked_seeds(grid)
    if grid is not None:
        cells = {cell.name for cell in grid.cells}
        finished = [run for run in finished if run.summary["cell"] in cells]
        check_grid_runs(grid, finished)
        unfinished = [folder for folder in unfinished if folder.parent.name in cells]
    if not finished:
        raise SummaryError(
            f"'{runs_dir}' holds no finished run ({len(unfinished)} unfinished); "
            "finish one first: darlit fit --config experiments/tiny_residual.yaml"
        )
    for run in finished:
        check_last_validation(run.summary, run.file)
    comparisons = _compare_all(finished, asked)
    if not arguments.overwrite:
        _check_page(out, finished)

    # Files first: whatever happens to the terminal, the table is written.
    if arguments.into is not None:
        short = "\n".join(f"Size {one.size}:\n\n{markdown(one, brief=True)}" for one in comparisons)
        replace_between(arguments.into, _NAME, f"\n{short}")
    _write(comparisons, finished, out, figures)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for comparison in comparisons:
        show(comparison, console)
    if unfinished:
        console.print(f"{len(unfinished)} unfinished: " + ", ".join(map(str, unfinished)), highlight=False)
    console.print(
        f"written: {out}/table.md, .csv, .tex, README.md" + (", figures/" if figures != "none" else ""), highlight=False
    )
    return 0


def _compare_all(finished: Sequence[Run], asked: dict[str, dict[str, list[int]]]) -> list[Comparison]:
    sizes = check_runs(finished)
    comparisons = []
    for size in sorted({*sizes, *asked}, key=size_order):
        cells = sizes.get(size, {})
        # Without a grid file, every arm of a size is asked for the seeds that any of its arms has.
        every_seed = sorted({run.summary["seed"] for runs in cells.values() for run in runs})
        comparisons.append(compare(size, cells, asked.get(size) or dict.fromkeys(cells, every_seed)))
    return comparisons


def _check_page(out: Path, finished: Sequence[Run]) -> None:
    """Raise if writing to ``out`` would replace a page with rows of other runs, or a page that is not ours.

    Raises:
        SummaryError: names the page, the first such row, and what to type.
    """
    page, ours = out / "README.md", {(run.summary["cell"], run.summary["seed"]): run.summary for run in finished}
    remedy = "write elsewhere with --out FOLDER, or replace it with --overwrite"
    if page.is_file() and not page.read_text(encoding="utf-8").startswith(HEAD):
        raise SummaryError(f"{page} was not written by darlit results; {remedy}")
    kept = find_runs(out / "runs")[0] if (out / "runs").is_dir() else []
    for run in kept:
        name = (run.summary["cell"], run.summary["seed"])
        if name not in ours or without_timing(ours[name]) != without_timing(run.summary):
            state = "another run of" if name in ours else "a row of"
            raise SummaryError(f"{page} holds {state} {name[0]} seed {name[1]}; {remedy}")


def _write(comparisons: Sequence[Comparison], finished: Sequence[Run], out: Path, figures: str) -> None:
    tables = "\n".join(f"## {comparison.size}\n\n{markdown(comparison)}" for comparison in comparisons)
    write_text(out / "table.md", tables)
    write_text(out / "table.csv", comma_separated(comparisons))
    write_text(out / "table.tex", latex(comparisons))
    for run in finished:
        copy = out / "runs" / run.summary["cell"] / f"seed_{run.summary['seed']}.json"
        if not (copy.exists() and copy.samefile(run.file)):
            write_text(copy, run.file.read_text(encoding="utf-8"))
    pictures = write_figures(comparisons, out / "figures", svg=figures == "svg") if figures != "none" else []
    notes = (out / "notes.md").read_text(encoding="utf-8") if (out / "notes.md").is_file() else ""
    page = readme(comparisons, [picture.relative_to(out) for picture in pictures], notes, _analyses(out))
    write_text(out / "README.md", page)


def _analyses(out: Path) -> list[Section]:
    """What `darlit analyze --out OUT/analysis` found in some of the models, its pictures drawn again."""
    if not (out / "analysis").is_dir():
        return []
    from darlit.analysis.report import redraw  # PyTorch comes with it

    return [
        Section(found.title, found.headlines, [picture.relative_to(out) for picture in found.pictures])
        for found in redraw(out / "analysis")
    ]


def _asked_seeds(grid: Grid | None) -> dict[str, dict[str, list[int]]]:
    """By size and cell, the seeds that a grid asks for; empty without one."""
    asked: dict[str, dict[str, list[int]]] = {}
    for task in grid.tasks if grid else ():
        asked.setdefault(task.cell.size, {}).setdefault(task.cell.name, []).append(task.seed)
    return asked
