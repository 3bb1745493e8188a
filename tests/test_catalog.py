"""Sizes x arms: every cell says what ``tests/golden/cells.json`` says, files are few and used, names and errors.

The golden file was written when each cell was a file of its own. It holds the leaves that all cells of a size share,
the leaves of each cell (of a variation with what its grid sets), and the runs of each grid. Optimizer options that a
cell leaves to their defaults are filled in. ``python tests/test_catalog.py`` writes it again; do so only for a change
that is meant.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from darlit import catalog
from darlit.experiment import ExperimentError, load_experiment, load_experiments, merge, size_and_arm, with_block_size
from darlit.grid import claims
from darlit.grid.cells import Cell, catalog_cell, read_grid
from darlit.grid.equal_budget import flatten
from darlit.modules.arms import MODULES
from darlit.modules.optimizer import OptimizerConfig

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "cells.json"
DEFAULTS = {"model": {"init_args": {"optimizer": asdict(OptimizerConfig())}}}
GRIDS = sorted(file for file in (ROOT / "experiments").glob("*/*.yaml"))
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))
golden: dict[str, Any] = json.loads(GOLDEN.read_text())


def leaves(config: Any) -> dict[str, Any]:
    """The resolved values of a configuration by dotted name."""
    found: dict[str, Any] = {}
    for part, content in merge(DEFAULTS, with_block_size(dict(config))).items():
        found |= flatten(part, content)
    return {name.replace("model.init_args.", ""): value for name, value in sorted(found.items())}


def expected(cell: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    size = golden["sizes"][size_and_arm(cell)[0]]
    return dict(sorted({**size, **golden["cells"][cell], **(changes or {})}.items()))


def as_text(values: dict[str, Any]) -> str:
    """As text 1, 1.0 and true differ."""
    return json.dumps(values, indent=1, sort_keys=True)


@pytest.mark.parametrize("cell", [name for name in golden["cells"] if "-" not in name])
def test_a_cell_is_what_its_file_was(cell: str) -> None:
    assert as_text(leaves(load_experiments(catalog.cell_files(cell)))) == as_text(expected(cell))


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_a_file_of_two_lines_is_the_cell_of_its_name(file: Path) -> None:
    assert as_text(leaves(load_experiment(file))) == as_text(expected(file.stem))
    assert len(file.read_text().splitlines()) <= 2


@pytest.mark.parametrize("file", GRIDS, ids=lambda file: file.stem)
def test_a_grid_has_the_runs_that_it_had(file: Path) -> None:
    described = golden["grids"][file.stem]
    runs = [(name, part["seeds"], part["changes"]) for part in described for name in part["cells"]]
    cells = read_grid(file).cells
    assert [(cell.name, list(cell.seeds)) for cell in cells] == [(name, seeds) for name, seeds, _ in runs]
    for cell, (name, _, changes) in zip(cells, runs, strict=True):
        assert as_text(leaves(cell.config)) == as_text(expected(name, changes))


def test_every_grid_is_in_the_golden_file() -> None:
    assert {file.stem for file in GRIDS} == set(golden["grids"])


@pytest.mark.parametrize(
    ("cell", "leaf", "value"),
    [
        ("tiny_moe_dar", "pathway.block_size", 2),
        ("dense0.1b_dar_block", "pathway.block_size", 2),
        ("dense1b_dar_block", "pathway.block_size", 3),
        ("moe7b_dar", "pathway.block_size", 2),
        ("tiny_dar_full-lr_3", "optimizer.pathway_lr_multiplier", 3.0),
        ("small_residual-lr1e-3", "optimizer.learning_rate", 1e-3),
    ],
)
def test_the_golden_file_holds_values(cell: str, leaf: str, value: Any) -> None:
    assert expected(cell)[leaf] == value


def test_yaml_files_are_few_and_each_is_used() -> None:
    files = {file for folder in ("configs", "experiments") for file in (ROOT / folder).rglob("*.yaml")}
    catalog_files = {file for file in files if file.parent.name in ("size", "arm")}
    assert len(files - catalog_files) <= 21, "a new size or arm is a file; a new cell is SIZE_ARM and none"

    grids = {file for cell_grid in GRIDS for cell in read_grid(cell_grid).cells for file in cell.files}
    used = {file.resolve() for file in grids}
    for file in files:
        base = load_base(file)
        used |= {(file.parent / name).resolve() for name in base}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Makefile", *(ROOT / "slurm").iterdir()]
    text = "\n".join(page.read_text() for page in pages)
    assert [file for file in files - used if str(file.relative_to(ROOT)) not in text] == []


def load_base(file: Path) -> list[str]:
    found = re.search(r"^base: \[(.*)\]$", file.read_text(), re.MULTILINE)
    return found[1].split(", ") if found else []


def test_the_tables_list_the_files() -> None:
    assert sorted(catalog.SIZES) == sorted(file.stem for file in (ROOT / "configs" / "size").glob("*.yaml"))
    assert sorted(catalog.ARMS) == sorted(file.stem for file in (ROOT / "configs" / "arm").glob("*.yaml"))
    assert {name: module.pathway_name for name, module in MODULES.items()} == catalog.PATHWAYS


def test_an_arm_says_its_class_and_its_options_and_nothing_else() -> None:
    for file in (ROOT / "configs" / "arm").glob("*.yaml"):
        config = load_experiments([ROOT / "configs" / "size" / "tiny.yaml", file])
        without = load_experiment(ROOT / "configs" / "size" / "tiny.yaml")
        changed = {name for name, value in leaves(config).items() if leaves(without).get(name) != value}
        assert all(name == "model.class_path" or name.startswith("pathway.") for name in changed), file


def test_two_names_of_one_arm_are_one_arm() -> None:
    assert catalog.arm("dar", 24) == catalog.arm("dar_block", 24) == ("dar", {"block_size": 3, "route": "dar"})
    assert set(catalog.ARMS) - set(catalog.arms(24)) == {"dar"}


def test_claims_are_about_arms_and_sizes_of_the_catalog() -> None:
    for claim in claims.ORDER_CLAIMS:
        assert {claim.lower, claim.higher} <= set(catalog.ARMS)
    for size in catalog.SIZES:
        for arm in catalog.ARMS:
            assert claims.paper_claim(size, arm) is None or not size.startswith(("tiny", "small"))


def test_the_docs_list_every_size_and_arm() -> None:
    page = (ROOT / "docs" / "experiments.md").read_text()
    for size in catalog.SIZES:
        config = load_experiment(ROOT / "configs" / "size" / f"{size}.yaml")
        backbone = config["model"]["init_args"]["backbone"]
        (row,) = (line.split("|")[1:-1] for line in page.splitlines() if line.startswith(f"| {size} |"))
        _, layers, width, _, tokens, batch, rate = (cell.strip() for cell in row)
        assert (int(layers), int(width)) == (backbone["num_layers"], backbone["width"])
        assert float(tokens[:-1]) * {"M": 1e6, "B": 1e9}[tokens[-1]] == pytest.approx(
            config["budget"]["tokens"], rel=0.03
        )
        assert int(batch.replace(",", "")) == config["budget"]["batch_tokens"]
        assert float(rate) == config["model"]["init_args"]["optimizer"]["learning_rate"]
    table = page.split("| arm | what it is |\n|---|---|\n")[1].split("\n\n")[0]
    assert table.splitlines() == [f"| `{arm}` | {text} |" for arm, text in catalog.ARMS.items()]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("smal_dar_full", ["no cell 'smal_dar_full'", "did you mean small_dar_full?"]),
        ("tiny", ["SIZE_ARM, sizes are tiny, tiny_moe, small, ", "arms are residual, transparent, "]),
        ("tiny_", ["no cell 'tiny_'"]),
        ("../tiny_dar", ["no cell '../tiny_dar'"]),
    ],
)
def test_an_unknown_cell_is_one_line_with_the_nearest_name(cell: str, words: list[str]) -> None:
    with pytest.raises(ExperimentError) as caught:
        catalog.cell_files(cell)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_the_nearest_configs_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("size/tiny.yaml", "arm/mine.yaml"):
        (tmp_path / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / name).write_text("{}\n")
    elsewhere = tmp_path / "experiments" / "grids"
    elsewhere.mkdir(parents=True)
    assert catalog.cell_files("tiny_mine", near=elsewhere)[1] == tmp_path / "configs" / "arm" / "mine.yaml"
    monkeypatch.chdir(elsewhere)
    assert catalog.cell_files("tiny_mine")[0] == tmp_path / "configs" / "size" / "tiny.yaml"
    monkeypatch.chdir(tmp_path.parent)
    assert catalog.cell_files("tiny_dar_full")[0] == ROOT / "configs" / "size" / "tiny.yaml"


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["configs/size/small.yaml", "configs/arm/dar_full.yaml"], "small_dar_full"),
        (["configs/arm/dar.yaml", "configs/size/moe7b.yaml"], "moe7b_dar"),
        (["configs/size/small.yaml", "configs/arm/dar_full.yaml", "configs/trainer/gpu.yaml"], "small_dar_full"),
        (["configs/size/small.yaml", "configs/arm/dar_full.yaml", "mine.yaml"], "mine"),
        (["experiments/dense1b_dar_block.yaml", "configs/trainer/fsdp.yaml"], "dense1b_dar_block"),
        (["experiments/tiny_residual.yaml"], "tiny_residual"),
        (["configs/trainer/cpu.yaml"], "cpu"),
    ],
)
def test_the_name_of_what_files_make(files: list[str], name: str) -> None:
    assert catalog.cell_name([Path(file) for file in files]) == name


def test_a_cell_of_the_catalog_names_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cell = catalog_cell("small_dar_block")
    assert cell.source == "configs/size/small.yaml + configs/arm/dar_block.yaml"
    assert cell.options == [
        "--config=configs/size/small.yaml", "--config=configs/arm/dar_block.yaml", "--cell=small_dar_block"
    ]  # fmt: skip


def describe() -> dict[str, Any]:
    """What the golden file holds."""
    sizes = {file.stem: leaves(load_experiment(file)) for file in sorted((ROOT / "configs" / "size").glob("*.yaml"))}
    grids = {file.stem: read_grid(file).cells for file in GRIDS}
    known = {cell.name: cell for cells in grids.values() for cell in cells}
    plain = {name for name in (*golden["cells"], *known) if "-" not in name}
    full = {name: leaves(known[name].config) for name in known if name not in plain}
    full |= {name: leaves(load_experiments(catalog.cell_files(name))) for name in plain}

    def without(values: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in shared or shared[name] != value}

    def part(cell: Cell) -> str:
        return json.dumps([list(cell.seeds), without(leaves(cell.config), full[cell.name])])

    listed = {}
    for file, cells in grids.items():
        parts = [(json.loads(key), list(group)) for key, group in groupby(cells, key=part)]
        listed[file] = [
            {"cells": [cell.name for cell in group], "seeds": seeds, "changes": changes}
            for (seeds, changes), group in parts
        ]
    own = {name: without(full[name], sizes[size_and_arm(name)[0]]) for name in sorted(full)}
    return {"sizes": sizes, "cells": own, "grids": listed}


def write() -> None:
    """One line a size, a cell and a grid."""
    parts = []
    for part, entries in describe().items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        parts.append(f'"{part}": {{\n{lines}\n}}')
    GOLDEN.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    write()
