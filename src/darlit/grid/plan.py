"""``darlit grid plan``: what each cell and the whole grid will cost, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from darlit.errors import DarlitError
from darlit.grid.cells import Cell, Grid

_HEADINGS = ("cell", "runs", "tokens a run", "batch in tokens", "steps", "parameters", "pathway's", "FLOPs in all")


@dataclass(frozen=True)
class CellPlan:
    """What one cell costs. FLOPs count the branches and the head, as in the results; not the pathway's arithmetic."""

    cell: Cell
    tokens: int
    batch_tokens: int
    parameters: int
    pathway_parameters: int
    flops_per_token: float

    @property
    def steps(self) -> int:
        """Optimiser steps of one run."""
        return self.tokens // self.batch_tokens

    @property
    def flops(self) -> float:
        """Training FLOPs of all seeds."""
        return self.flops_per_token * self.tokens * len(self.cell.seeds)


def plan_cell(cell: Cell) -> CellPlan:
    """Count a cell's parameters and FLOPs on a model without storage.

    Raises:
        DarlitError: an experiment without a model or a budget, or with options that its model refuses.
    """
    import torch

    from darlit.backbone.flops import training_flops_per_token
    from darlit.modules import variants

    model = _mapping(cell, "model")
    variant = variants().get(str(model.get("class_path")).rpartition(".")[2])
    if variant is None:
        known = ", ".join(sorted(variants()))
        raise DarlitError(f"{cell.file}: model.class_path is {model.get('class_path')!r}; known are {known}")
    options = {"pathway": {}, "backbone": {}, "optimizer": {}, **model.get("init_args", {})}
    options["backbone"] = {**options["backbone"], "sequence_length": _mapping(cell, "data").get("sequence_length", 128)}
    try:
        with torch.device("meta"):
            module: Any = variant(**options)
    except (TypeError, ValueError) as error:
        raise DarlitError(f"{cell.file}: {error}") from error
    return CellPlan(
        cell=cell,
        tokens=_budget(cell, "tokens"),
        batch_tokens=_budget(cell, "batch_tokens"),
        parameters=sum(parameter.numel() for parameter in module.transformer.parameters()),
        pathway_parameters=sum(parameter.numel() for parameter in module.transformer.pathway.parameters()),
        flops_per_token=training_flops_per_token(module.transformer),
    )


def plan_table(grid: Grid) -> Table:
    """Return a line a cell and the totals."""
    plans = [plan_cell(cell) for cell in grid.cells]
    footers = {
        "cell": f"{len(plans)} cells",
        "runs": str(len(grid.tasks)),
        "tokens a run": f"{sum(plan.tokens * len(plan.cell.seeds) for plan in plans):,} in all",
        "FLOPs in all": f"{sum(plan.flops for plan in plans):.3g}",
    }
    table = Table(title=f"grid {grid.name}", title_justify="left", title_style="bold", show_footer=True)
    for heading in _HEADINGS:
        table.add_column(heading, footers.get(heading, ""), justify="left" if heading == "cell" else "right")
    for plan in plans:
        table.add_row(
            plan.cell.name,
            str(len(plan.cell.seeds)),
            *(f"{number:,}" for number in (plan.tokens, plan.batch_tokens, plan.steps, plan.parameters)),
            f"{plan.pathway_parameters:,}",
            f"{plan.flops:.3g}",
        )
    return table


def _mapping(cell: Cell, key: str) -> dict[str, Any]:
    value = cell.config.get(key)
    if not isinstance(value, dict):
        raise DarlitError(f"{cell.file}: {key} is {value!r}; it must be a mapping, here or in a base")
    return value


def _budget(cell: Cell, key: str) -> int:
    value = _mapping(cell, "budget").get(key)
    if type(value) is not int or value < 1:
        raise DarlitError(f"{cell.file}: budget.{key} is {value!r}; name a whole number from 1 in the file or the grid")
    return value
