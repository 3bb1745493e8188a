"""``darlit grid plan`` counts what the run itself will report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from darlit.__main__ import main
from darlit.errors import DarlitError
from darlit.grid.cells import read_grid
from darlit.grid.plan import plan_cell

REPOSITORY = Path(__file__).parents[2]


def _grid(folder: Path, **changes: Any) -> Path:
    cell = {"base": str(REPOSITORY / "experiments" / "tiny_dar_full.yaml"), **changes}
    (folder / "tiny_dar_full.yaml").write_text(yaml.safe_dump(cell))
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"groups": {"tiny": {"cells": ["tiny_dar_full"], "seeds": [0, 1]}}}))
    return path


def test_counts_are_those_of_the_model_that_will_be_built(tmp_path: Path) -> None:
    from darlit.modules import variants

    plan = plan_cell(read_grid(_grid(tmp_path)).cells[0])
    module: Any = variants()["DualAttentionResidualLM"](
        pathway={"block_size": 1, "route": "dar"},
        backbone={"vocab_size": 257, "num_layers": 4, "width": 128, "num_heads": 4, "ffn_width": 384},
        optimizer={},
    )
    assert plan.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert 0 < plan.pathway_parameters < plan.parameters
    assert plan.steps == plan.tokens // plan.batch_tokens
    assert plan.flops == 2 * plan.tokens * plan.flops_per_token


def test_a_billion_parameters_are_planned_without_storage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", "plan", str(REPOSITORY / "experiments" / "grids" / "dense1b.yaml")]) == 0
    out = capsys.readouterr().out
    assert "1,026,092,800" in out
    assert "11 cells" in out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"class_path": "NoSuchLM"}}, "model.class_path is 'NoSuchLM'; known are "),
        ({"model": {"init_args": {"pathway": {"block_size": 9}}}}, "block_size"),
        ({"budget": {"tokens": "many"}}, "budget.tokens is 'many'"),
    ],
)
def test_a_cell_that_cannot_be_built_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    cell = read_grid(_grid(tmp_path, **changes)).cells[0]
    with pytest.raises(DarlitError) as error:
        plan_cell(cell)
    assert str(error.value).startswith(str(tmp_path / "tiny_dar_full.yaml"))
    assert said in str(error.value)
