"""``darlit plan EXPERIMENT...`` and ``darlit grid plan GRID``: what training will cost, before anything runs."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from darlit.arguments import Parser
from darlit.experiment import load_parts
from darlit.grid.cells import Cell, catalog_cell, read_grid
from darlit.grid.estimate import PRECISIONS, STRATEGIES, CellPlan, CountedMemory, Machine, plan_cell

COLUMNS = 4
"""Experiments side by side."""


def main(argv: list[str]) -> int:
    """Print the plan; bad input raises a one-line DarlitError."""
    parser = Parser(
        prog="darlit plan", description="Parameters, memory, speed and GPU-hours of experiments; needs no GPU."
    )
    parser.add_argument(
        "experiments", nargs="+", metavar="EXPERIMENT", help="experiment or grid files, or cells such as small_dar_full"
    )
    add_options(parser)
    arguments = parser.parse_args(argv)
    cells: list[Cell] = []
    for experiment in arguments.experiments:
        cells += _cells(experiment)
    return run(cells, arguments)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that both verbs take."""
    add = parser.add_argument
    add("--gpus", type=int, help="of all nodes together (default: the experiment's devices, 1 for auto)")
    add("--precision", choices=PRECISIONS, help="default: the experiment's")
    add("--strategy", choices=STRATEGIES, help="whole model on every GPU, or a shard (default: the experiment's)")
    add("--utilisation", type=float, default=0.4, help="share of the peak that is reached (default: %(default)s)")
    add(
        "--peak_tflops", type=float, help="of one GPU in that precision (default: H100 SXM, 989 in bf16, 67 in 32-true)"
    )
    counted = parser.add_mutually_exclusive_group()
    counted.add_argument("--both", action="store_true", help="memory with layers kept and recomputed, not only its own")
    counted.add_argument("--quick", action="store_true", help="leave out the memory, which takes seconds an experiment")
    add("--json", action="store_true", help="print JSON instead of tables")


def run(cells: Sequence[Cell], arguments: argparse.Namespace) -> int:
    """Plan all cells and print them."""
    with _collector_off():
        return _run(cells, arguments)


@contextmanager
def _collector_off() -> Iterator[None]:
    """No garbage collection: imports and fake passes make a million small objects to walk through, and no garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(cells: Sequence[Cell], arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import track

    from darlit.grid import plan_report

    given = {name: getattr(arguments, name) for name in Machine.__dataclass_fields__}
    machine = Machine(**given)
    errors = Console(stderr=True)
    memory: CountedMemory = "none" if arguments.quick else "both" if arguments.both else "own"
    plans: list[CellPlan] = [
        plan_cell(cell, machine, memory)
        for cell in track(cells, "counting", console=errors, transient=True, disable=not errors.is_terminal)
    ]
    if arguments.json:
        print(json.dumps(plan_report.as_json(plans, machine), indent=1))
        return 0
    console = Console() if Console().is_terminal else Console(width=160)
    if len(plans) <= COLUMNS:
        console.print(plan_report.figures(plans, machine))
    if len(plans) > 1:
        console.print(plan_report.summary(plans))
    for note in plan_report.notes(plans, machine):
        console.print(note, soft_wrap=True, highlight=False)
    return 0


def _cells(experiment: str) -> list[Cell]:
    file = Path(experiment)
    if not experiment.endswith((".yaml", ".yml")) and not file.exists():
        return [catalog_cell(experiment)]
    config = load_parts([file])
    if "groups" in config:
        return list(read_grid(file).cells)
    seed = config.get("seed_everything", 0)
    return [Cell(str(config.get("cell", file.stem)), (file,), {}, config, (seed,), group="", varies=())]
