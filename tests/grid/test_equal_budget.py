"""The equal-budget check refuses every field of the budget, by name, with both values and both files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from darlit.grid.equal_budget import UnequalBudgetError, check_runs
from darlit.grid.runs import find_runs
from grid.fakes import make_summary, write_run


def _check(runs_dir: Path) -> Any:
    finished, _ = find_runs(runs_dir)
    return check_runs(finished)


@pytest.mark.parametrize(
    ("path", "value", "field", "shown"),
    [
        ("data__fingerprint", "e" * 64, "data fingerprint", "'eee"),
        ("data__tokenizer", "bpe", "tokenizer", "'bpe'"),
        ("data__vocab_size", 300, "vocabulary", "300"),
        ("budget__tokens", 4000, "tokens", "4000"),
        ("budget__batch_tokens", 40, "batch in tokens", "40"),
        ("budget__steps", 200, "steps", "200"),
        ("budget__sequence_length", 20, "sequence length", "20"),
        ("budget__val_batches", 8, "validation batches", "8"),
        ("budget__val_tokens", 81, "validation tokens", "81"),
        ("tokens_seen", 1980, "tokens seen", "1980"),
        ("backbone__layers", 5, "backbone.layers", "5"),
        ("backbone__rope__base", 500.0, "backbone.rope.base", "500.0"),
        ("optimizer__lr", 0.002, "optimizer.lr", "0.002"),
        ("optimizer__schedule__warmup", 0.1, "optimizer.schedule.warmup", "0.1"),
        ("optimizer__extra", 1, "optimizer.extra", "1"),
        ("precision", "bf16-mixed", "precision", "'bf16-mixed'"),
        ("clock", "process", "clock", "'process'"),
    ],
)
def test_an_unequal_field_is_refused(tmp_path: Path, path: str, value: Any, field: str, shown: str) -> None:
    first = write_run(tmp_path, make_summary("tiny", "residual", 0))
    other = write_run(tmp_path, make_summary("tiny", "dar_full", 0, **{path: value}))
    with pytest.raises(UnequalBudgetError) as error:
        _check(tmp_path)
    message = str(error.value)
    assert f"size tiny: {field} differs: " in message
    assert str(first) in message
    assert f"{shown}" in message.split(str(first))[1]
    assert str(other) in message
    assert "\n" not in message


def test_a_field_that_one_side_lacks_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, make_summary("tiny", "residual", 0, backbone={"layers": 4}))
    write_run(tmp_path, make_summary("tiny", "dar_full", 0))
    with pytest.raises(UnequalBudgetError, match=r"backbone.rope.base differs: unset in"):
        _check(tmp_path)


def test_two_seeds_of_a_cell_must_share_their_pathway(tmp_path: Path) -> None:
    write_run(tmp_path, make_summary("tiny", "dar_block", 0, pathway={"name": "dar", "block_size": 2}))
    write_run(tmp_path, make_summary("tiny", "dar_block", 1, pathway={"name": "dar", "block_size": 4}))
    with pytest.raises(UnequalBudgetError, match=r"cell tiny_dar_block: pathway.block_size differs: 2 in .* 4 in"):
        _check(tmp_path)


def test_arms_without_a_common_seed_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, make_summary("tiny", "residual", 0))
    write_run(tmp_path, make_summary("tiny", "dar_full", 1))
    with pytest.raises(UnequalBudgetError, match=r"seeds differ: \[0\] in .*tiny_residual.*, \[1\] in .*tiny_dar_full"):
        _check(tmp_path)


def test_what_may_differ_does(tmp_path: Path) -> None:
    write_run(tmp_path, make_summary("tiny", "residual", 0))
    other = make_summary(
        "tiny", "dar_full", 0, tokens_per_second=1.0, peak_memory_bytes=7, flops_per_token=1.0, parameters__total=7
    )
    write_run(tmp_path, other)
    write_run(tmp_path, make_summary("small", "residual", 0, budget__tokens=9))
    sizes = _check(tmp_path)
    assert {size: list(cells) for size, cells in sizes.items()} == {
        "tiny": ["tiny_residual", "tiny_dar_full"],
        "small": ["small_residual"],
    }
