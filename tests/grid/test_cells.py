"""Grid files: what they may say, what is refused, and in which order their runs are numbered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from darlit.experiment import ExperimentError
from darlit.grid.cells import read_grid
from darlit.grid.equal_budget import UnequalBudgetError, check_grid

REPOSITORY = Path(__file__).parents[2]

BASE: dict[str, Any] = {
    "model": {
        "class_path": "ResidualLM",
        "init_args": {"backbone": {"num_layers": 4}, "optimizer": {"learning_rate": 0.002, "schedule": "cosine"}},
    },
    "data": {"folder": None, "tokenizer": "bytes", "sequence_length": 128, "val_sequences": 256},
    "budget": {"tokens": 1000, "batch_tokens": 100},
    "trainer": {"precision": "32-true", "accelerator": "cpu"},
}


def _write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def _grid(folder: Path, groups: Any, cells: tuple[str, ...] = ("tiny_residual", "tiny_dar_full")) -> Path:
    _write(folder / "base.yaml", BASE)
    for cell in cells:
        _write(folder / f"{cell}.yaml", {"base": "base.yaml"})
    return _write(folder / "grids" / "grid.yaml", {"groups": groups})


def _group(**changes: Any) -> dict[str, Any]:
    return {"tiny": {"cells": ["tiny_residual", "tiny_dar_full"], "seeds": [0, 2], **changes}}


def _sized(**changes: Any) -> dict[str, Any]:
    group = {"size": "tiny", "arms": ["residual"], "seeds": [0], **changes}
    return {"tiny": {key: value for key, value in group.items() if value is not None}}


def test_sizes_arms_and_variations_make_cells_in_order(tmp_path: Path) -> None:
    vary = {"default": {}, "fast": {"optimizer.learning_rate": 0.1, "pathway.block_size": 1}}
    changes = {"data.holdout": "screening"}
    groups = _sized(arms=["dar_block", "residual"], vary=vary, set=changes, budget={"tokens": 4096})
    grid = read_grid(_grid(tmp_path, {**groups, "mine": {"cells": ["tiny_mine"], "seeds": [0]}}, ("tiny_mine",)))
    assert [cell.name for cell in grid.cells] == [
        "tiny_dar_block-default", "tiny_dar_block-fast", "tiny_residual-default", "tiny_residual-fast", "tiny_mine",
    ]  # fmt: skip
    default, fast = grid.cells[:2]
    assert (fast.size, fast.arm, fast.group) == ("tiny", "dar_block-fast", "tiny")
    assert [file.name for file in fast.files] == ["tiny.yaml", "dar_block.yaml"]
    model = fast.config["model"]["init_args"]
    assert (model["optimizer"]["learning_rate"], model["pathway"]["block_size"]) == (0.1, 1)
    assert default.settings()["model"]["init_args"]["pathway"]["block_size"] == 2
    assert (fast.config["data"]["holdout"], fast.config["budget"]["tokens"]) == ("screening", 4096)
    assert fast.options[2:] == [
        "--cell=tiny_dar_block-fast",
        "--data.holdout=screening",
        "--budget.tokens=4096",
        "--model.init_args.optimizer.learning_rate=0.1",
        "--model.init_args.pathway.block_size=1",
    ]
    assert grid.cells[-1].options == [f"--config={tmp_path / 'tiny_mine.yaml'}", "--cell=tiny_mine"]


def test_values_are_options_as_the_command_line_reads_them(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "text": "a b",
        "none": None,
        "yes": True,
        "rate": 1e-05,
        "list": [1, "x"],
        "map": {"a": 1},
    }
    (cell,) = read_grid(_grid(tmp_path, _sized(set={f"data.{name}": value for name, value in values.items()}))).cells
    given = {option.partition("=")[0]: option.partition("=")[2] for option in cell.options[3:]}
    assert given["--data.text"] == "a b"
    assert given["--data.rate"] == "1e-05"
    for name in ("none", "yes", "list", "map"):
        assert yaml.safe_load(given[f"--data.{name}"]) == values[name]


def test_what_variations_change_may_differ_and_nothing_else(tmp_path: Path) -> None:
    vary = {"default": {}, "fast": {"optimizer.learning_rate": 0.1}, "long": {"budget.tokens": 4096}}
    other: dict[str, Any] = {"size": "tiny", "arms": ["dar_full"], "seeds": [0]}
    path = _grid(tmp_path, {**_sized(vary=vary), "other": other})
    assert list(check_grid(read_grid(path))) == ["tiny"]
    path = _grid(
        tmp_path, {**_sized(vary=vary), "other": {**other, "set": {"optimizer.schedule": "warmup_stable_decay"}}}
    )
    with pytest.raises(UnequalBudgetError, match="size tiny: optimizer.schedule differs: "):
        check_grid(read_grid(path))


def test_a_part_of_a_grid_is_numbered_from_0(tmp_path: Path) -> None:
    path = _grid(tmp_path, _sized(arms=["residual", "dar_full", "dar_block", "mhc2"], seeds=[0, 1]))
    tasks = read_grid(path, ["tiny_dar_*", "tiny_residual"]).tasks
    assert [(task.index, task.cell.name, task.seed) for task in tasks] == [
        (0, "tiny_residual", 0), (1, "tiny_residual", 1), (2, "tiny_dar_full", 0), (3, "tiny_dar_full", 1),
        (4, "tiny_dar_block", 0), (5, "tiny_dar_block", 1),
    ]  # fmt: skip
    with pytest.raises(ExperimentError, match="no cell is named 'small_.'; its cells are tiny_residual, tiny_dar_full"):
        read_grid(path, ["tiny_residual", "small_*"])


def test_runs_are_numbered_cell_by_cell_and_carry_the_groups_budget(tmp_path: Path) -> None:
    grid = read_grid(_grid(tmp_path, _group(budget={"tokens": 5000})))
    assert [(task.index, task.cell.name, task.seed) for task in grid.tasks] == [
        (0, "tiny_residual", 0), (1, "tiny_residual", 2), (2, "tiny_dar_full", 0), (3, "tiny_dar_full", 2),
    ]  # fmt: skip
    cell = grid.cells[1]
    assert (cell.size, cell.arm) == ("tiny", "dar_full")
    assert cell.config["budget"] == {"tokens": 5000, "batch_tokens": 100}
    assert cell.config["model"] == BASE["model"]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({}, "holds one key, 'groups'"),
        ([], "holds one key, 'groups'"),
        ({"tiny": {"seeds": [0]}}, "group 'tiny' needs 'seeds', and 'size' and 'arms' or 'cells'"),
        ({"tiny": {"cells": ["tiny_residual"]}}, "group 'tiny' needs 'seeds', and 'size' and 'arms' or 'cells'"),
        (_group(steps=3), "has no key 'steps'; did you mean seeds?"),
        (_group(varies="tokens"), "varies must be a list such as [optimizer.learning_rate]"),
        (_group(cells="tiny_residual"), "cells must be a list"),
        (_group(cells=[]), "cells must be a list"),
        (_sized(size=None), "size and arms go together"),
        (_sized(size=3), "size and arms go together"),
        (_group(size="tiny"), "size and arms go together"),
        (_sized(arms="residual"), "arms must be a list of names"),
        (_sized(arms=[]), "arms must be a list of names"),
        (_sized(arms=["residul"]), "no cell 'tiny_residul'"),
        (_sized(arms=["../dar"]), "cell name 'tiny_../dar' is not allowed"),
        (_sized(arms=["residual", "residual"]), "'tiny_residual' is named twice"),
        (_sized(vary=[]), "vary names variations"),
        (_sized(vary={}), "vary names variations"),
        (_sized(vary={1: {}}), "vary names variations"),
        (_sized(vary={"a b": {}}), "cell name 'tiny_residual-a b' is not allowed"),
        (_sized(vary={"fast": 3}), "vary maps fields to values"),
        (_sized(vary={"fast": {"optimizer": {"learning_rate": 1}}}), "vary maps fields to values"),
        (_sized(set={"learning_rate": 1}), "set maps fields to values"),
        (_sized(set=["data.holdout"]), "set maps fields to values"),
        (_group(seeds=[0.5]), "seeds must be a list of whole numbers"),
        (_group(seeds=[-1]), "seeds must be a list of whole numbers"),
        (_group(seeds=[True]), "seeds must be a list of whole numbers"),
        (_group(seeds=[1, 1]), "holds a seed twice"),
        (_group(budget=7), "budget must be a mapping"),
        (_group(cells=["tiny_residual", "tiny_residual"]), "'tiny_residual' is named twice"),
        (_group(cells=["tiny_absent"]), "cell 'tiny_absent' has no file"),
        (_group(cells=["../tiny_residual"]), "cell name '../tiny_residual' is not allowed"),
        (_group(cells=["a b"]), "cell name 'a b' is not allowed"),
        (_group(cells=["$(rm x)"]), "is not allowed"),
        (_group(cells=["a;b"]), "is not allowed"),
        (_group(cells=["it's"]), "is not allowed"),
        (_group(cells=["two\nlines"]), "is not allowed"),
        (_group(cells=["-x"]), "is not allowed"),
        (_group(cells=[""]), "is not allowed"),
    ],
)
def test_a_malformed_grid_is_refused_in_one_line(tmp_path: Path, groups: Any, said: str) -> None:
    with pytest.raises(ExperimentError) as error:
        read_grid(_grid(tmp_path, groups))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_grid_files_own_name_must_be_safe_too(tmp_path: Path) -> None:
    hostile = _grid(tmp_path, _group()).rename(tmp_path / "grids" / "a$(b).yaml")
    with pytest.raises(ExperimentError, match="grid name 'a\\$\\(b\\)' is not allowed"):
        read_grid(hostile)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data": {"folder": "elsewhere"}}, "data.folder"),
        ({"data": {"tokenizer": "bpe"}}, "tokenizer"),
        ({"budget": {"tokens": 2000}}, "tokens"),
        ({"budget": {"batch_tokens": 200}}, "batch in tokens"),
        ({"budget": {"validation_interval": 5}}, "budget.validation_interval"),
        ({"data": {"sequence_length": 64}}, "sequence length"),
        ({"data": {"val_sequences": 64}}, "validation sequences"),
        ({"trainer": {"limit_val_batches": 3}}, "validation batches"),
        ({"model": {"init_args": {"backbone": {"num_layers": 5}}}}, "backbone.num_layers"),
        ({"model": {"init_args": {"optimizer": {"learning_rate": 0.1}}}}, "optimizer.learning_rate"),
        ({"model": {"init_args": {"optimizer": {"schedule": "warmup_stable_decay"}}}}, "optimizer.schedule"),
        ({"trainer": {"gradient_clip_val": 2.0}}, "trainer.gradient_clip_val"),
        ({"trainer": {"precision": "bf16-mixed"}}, "precision"),
    ],
)
def test_experiments_of_unequal_budget_are_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    path = _grid(tmp_path, _group())
    other = _write(tmp_path / "tiny_dar_full.yaml", {"base": "base.yaml", **changes})
    with pytest.raises(UnequalBudgetError) as error:
        check_grid(read_grid(path))
    assert str(error.value).startswith(f"size tiny: {field} differs: ")
    assert str(other) in str(error.value)
    assert str(tmp_path / "tiny_residual.yaml") in str(error.value)


def test_what_a_group_compares_may_differ_and_nothing_else(tmp_path: Path) -> None:
    path = _grid(tmp_path, _group(varies=["optimizer.learning_rate"]))
    model = {"init_args": {"optimizer": {"learning_rate": 0.1}}}
    _write(tmp_path / "tiny_dar_full.yaml", {"base": "base.yaml", "model": model})
    assert list(check_grid(read_grid(path))) == ["tiny"]
    model["init_args"]["optimizer"]["schedule"] = "warmup_stable_decay"
    _write(tmp_path / "tiny_dar_full.yaml", {"base": "base.yaml", "model": model})
    with pytest.raises(UnequalBudgetError, match="size tiny: optimizer.schedule differs: "):
        check_grid(read_grid(path))


def test_groups_of_one_size_must_ask_for_the_same_seeds_and_budget(tmp_path: Path) -> None:
    first = {"cells": ["tiny_residual"], "seeds": [0, 1]}
    path = _grid(tmp_path, {"a": first, "b": {"cells": ["tiny_dar_full"], "seeds": [0]}})
    with pytest.raises(UnequalBudgetError, match=r"seeds differs: \[0, 1\] in .*, \[0\] in "):
        check_grid(read_grid(path))
    path = _grid(tmp_path, {"a": first, "b": {**first, "cells": ["tiny_dar_full"], "budget": {"tokens": 700}}})
    with pytest.raises(UnequalBudgetError, match=r"tokens differs: 1000 in .*, 700 in "):
        check_grid(read_grid(path))


def test_the_pathway_and_the_place_may_differ(tmp_path: Path) -> None:
    path = _grid(tmp_path, _group())
    changes = {
        "base": "base.yaml",
        "model": {"class_path": "DualAttentionResidualLM", "init_args": {"pathway": {"block_size": 2}}},
        "trainer": {"accelerator": "gpu", "devices": 8, "strategy": "auto"},
    }
    _write(tmp_path / "tiny_dar_full.yaml", changes)
    assert list(check_grid(read_grid(path))) == ["tiny"]


@pytest.mark.parametrize(
    "file", sorted((REPOSITORY / "experiments" / "grids").glob("*.yaml")), ids=lambda file: file.stem
)
def test_every_grid_of_the_repository_shares_its_budgets(file: Path) -> None:
    grid = read_grid(file)
    assert check_grid(grid)
    for size in {cell.size for cell in grid.cells}:
        assert f"{size}_residual" in {cell.name for cell in grid.cells}, "nothing to compare with"
