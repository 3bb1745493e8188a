"""Every cell and every grid of the repository says what ``tests/golden/cells.json`` says.

The golden file holds the leaves that all cells of a size share, each cell's own leaves, and each grid's runs.
Optimizer options that a cell leaves to their defaults are filled in. ``python tests/test_every_cell.py`` writes it
again; do so only for a change that is meant.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from darlit.experiment import load_experiment, merge, size_and_arm
from darlit.grid.cells import Cell, read_grid
from darlit.grid.equal_budget import flatten
from darlit.modules.optimizer import OptimizerConfig

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "cells.json"
DEFAULTS = {"model": {"init_args": {"optimizer": asdict(OptimizerConfig())}}}


def leaves(config: dict[str, Any]) -> dict[str, Any]:
    """The resolved values of a configuration by dotted name."""
    found: dict[str, Any] = {}
    for part, content in merge(DEFAULTS, config).items():
        found |= flatten(part, content)
    return {name.replace("model.init_args.", ""): value for name, value in sorted(found.items())}


def without(values: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The values that ``shared`` has otherwise or not at all; None for those that only ``shared`` has."""
    return {name: value for name, value in values.items() if name not in shared or shared[name] != value} | {
        name: None for name in shared if name not in values
    }


def cells() -> dict[str, dict[str, Any]]:
    files = sorted((ROOT / "experiments").rglob("*.yaml"))
    contents = {file.stem: load_experiment(file) for file in files}
    return {name: leaves(config) for name, config in contents.items() if "class_path" in config.get("model", {})}


def grids() -> list[Path]:
    return [file for file in sorted((ROOT / "experiments").rglob("*.yaml")) if "groups" in load_experiment(file)]


def describe() -> dict[str, Any]:
    """What the golden file holds."""
    found = cells()
    sizes = {file.stem: leaves(load_experiment(file)) for file in sorted((ROOT / "configs").glob("*.yaml"))}

    def runs(cell: Cell) -> dict[str, Any]:
        changes = without(leaves(dict(cell.config)), found[cell.name])
        return {"seeds": list(cell.seeds), "changes": changes}

    listed: dict[str, Any] = {}
    for file in grids():
        groups = groupby(read_grid(file).cells, key=lambda cell: json.dumps([cell.group, runs(cell)]))
        listed[file.stem] = [
            {"cells": [cell.name for cell in group], **json.loads(key)[1]}
            for key, group in ((key, list(group)) for key, group in groups)
        ]
    own = {name: without(values, sizes[size_and_arm(name)[0]]) for name, values in sorted(found.items())}
    return {"sizes": sizes, "cells": own, "grids": dict(sorted(listed.items()))}


def test_nothing_differs_from_the_golden_file() -> None:
    golden, found = json.loads(GOLDEN.read_text()), describe()
    for part in golden:
        assert found[part].keys() == golden[part].keys(), part
        for name, expected in golden[part].items():
            # As text, where 1, 1.0 and true differ.
            assert json.dumps(found[part][name], sort_keys=True) == json.dumps(expected, sort_keys=True), name


@pytest.mark.parametrize(("name", "leaf", "value"), [
    ("dense1b_dar_block", "pathway.block_size", 3),
    ("moe7b_dar", "pathway.block_size", 2),
    ("tiny_dar_full-lr_3", "optimizer.pathway_lr_multiplier", 3.0),
])  # fmt: skip
def test_the_golden_file_holds_values(name: str, leaf: str, value: Any) -> None:
    assert json.loads(GOLDEN.read_text())["cells"][name][leaf] == value


def write() -> None:
    """One line a size, a cell and a group of a grid."""
    parts = []
    for part, entries in describe().items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        parts.append(f'"{part}": {{\n{lines}\n}}')
    GOLDEN.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    write()
