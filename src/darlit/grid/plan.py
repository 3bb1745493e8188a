"""``darlit grid plan``: what each cell and the whole grid will cost, before anything runs."""

from __future__ import annotations

from rich.table import Table

from darlit.errors import DarlitError
from darlit.grid.cells import Cell, Grid


def plan_table(grid: Grid) -> Table:
    """Return a line a cell (tokens, batch, steps of one run; runs; tokens of all) and the totals.

    Raises:
        DarlitError: a cell whose budget names no tokens or no batch.
    """
    table = Table(title=f"grid {grid.name}", title_justify="left", title_style="bold", show_footer=True)
    for heading in ("cell", "seeds", "tokens a run", "batch in tokens", "steps a run", "tokens in all"):
        table.add_column(heading, justify="left" if heading == "cell" else "right")
    total = 0
    for cell in grid.cells:
        tokens, batch = _budget(cell, "tokens"), _budget(cell, "batch_tokens")
        total += tokens * len(cell.seeds)
        numbers = (len(cell.seeds), tokens, batch, tokens // batch, tokens * len(cell.seeds))
        table.add_row(cell.name, *(f"{number:,}" for number in numbers))
    for column, footer in zip(table.columns, (f"{len(grid.cells)} cells", f"{len(grid.tasks)} runs"), strict=False):
        column.footer = footer
    table.columns[-1].footer = f"{total:,}"
    return table


def _budget(cell: Cell, key: str) -> int:
    value = cell.config.get("budget", {}).get(key)
    if type(value) is not int or value < 1:
        raise DarlitError(f"{cell.file}: budget.{key} is {value!r}; name a whole number from 1 in the file or the grid")
    return value
