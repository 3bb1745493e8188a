"""Tables to choose a setting by, and the summaries that they come from: numbers by hand, refusals, equal bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from darlit.errors import DarlitError
from darlit.grid.commands import main
from darlit.grid.equal_budget import UnequalBudgetError
from grid.fakes import make_summary, write_cell_file, write_run

CELLS = ("tiny_dar-default", "tiny_dar-layer", "tiny_dar-lr_3")
PAGE = "before\n<!-- begin: darlit grid choose pick -->\nold\n<!-- end: darlit grid choose pick -->\nafter\n"


def _grid(folder: Path, **group: Any) -> Path:
    for cell, pathway, optimizer in (
        (CELLS[0], {}, {}),
        (CELLS[1], {"beta_pattern": "layer"}, {}),
        (CELLS[2], {}, {"pathway_lr_multiplier": 3.0}),
    ):
        write_cell_file(folder, cell, "DualAttentionResidualLM", pathway=pathway, optimizer=optimizer)
    content = {"groups": {"DAR": {"cells": list(CELLS), "seeds": [10, 11, 12], **group}}}
    path = folder / "pick.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def _write(runs: Path, cell: str, seed: int, loss: float, **changes: Any) -> Path:
    size, arm = cell.split("_", 1)
    return write_run(runs, make_summary(size, arm, seed, val_loss_final=loss, **changes))


def _write_all(runs: Path) -> None:
    for seed, (default, layer) in zip((10, 11, 12), ((2.0, 1.9), (2.1, 1.9), (2.2, 2.3)), strict=True):
        _write(runs, CELLS[0], seed, default, pathway={"name": "dar", "beta_pattern": "branch"})
        _write(runs, CELLS[1], seed, layer, pathway={"name": "dar", "beta_pattern": "layer"})
    _write(
        runs, CELLS[2], 11, 2.5, pathway={"name": "dar", "beta_pattern": "branch"}, optimizer__pathway_lr_multiplier=3.0
    )


def test_the_table_of_a_screening_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = _grid(tmp_path, varies=["optimizer.pathway_lr_multiplier"])
    _write_all(tmp_path / "runs")
    for cell in CELLS[:2]:
        _write(tmp_path / "runs", cell, 99, 0.1, pathway={"name": "dar"})  # a seed of some other grid
    assert main(["choose", str(grid), "--runs_dir", str(tmp_path / "runs")]) == 0
    # Differences -0.1, -0.2, +0.1: mean -0.0667, sd 0.152753, t(0.95, 2) = 4.302653, half width 0.379461.
    assert capsys.readouterr().out.splitlines() == [
        "**DAR**",
        "",
        "| cell | change | n | val loss | paired Δ [95 %] | lower in |",
        "|---|---|--:|--:|--:|--:|",
        "| dar-default | — | 3 | 2.1000 ± 0.1000 | — | — |",
        "| dar-layer | pathway.beta_pattern = layer | 3 | 2.0333 ± 0.2309 | −0.0667 [−0.4461, +0.3128] | 2 of 3 |",
        "| dar-lr_3 | optimizer.pathway_lr_multiplier = 3.0 | 1 of 3 | 2.5000 | +0.4000 | 0 of 1 |",
    ]


def test_what_the_grid_does_not_compare_must_be_equal(tmp_path: Path) -> None:
    _write_all(tmp_path / "runs")
    with pytest.raises(UnequalBudgetError, match="optimizer.pathway_lr_multiplier differs: unset in .*, 3.0 in"):
        main(["choose", str(_grid(tmp_path)), "--runs_dir", str(tmp_path / "runs")])


def test_the_runs_of_a_cell_share_their_pathway(tmp_path: Path) -> None:
    _write(tmp_path / "runs", CELLS[0], 10, 2.0, pathway={"name": "dar", "rho_logit": 3})
    _write(tmp_path / "runs", CELLS[0], 11, 2.0, pathway={"name": "dar", "rho_logit": 4})
    with pytest.raises(DarlitError, match="seed_11.* was trained with pathway.rho_logit=4, now it is 3.0 in"):
        main(["choose", str(_grid(tmp_path)), "--runs_dir", str(tmp_path / "runs")])


def test_tables_are_written_between_their_markers_and_nowhere_else(tmp_path: Path) -> None:
    grid, page = _grid(tmp_path, varies=["optimizer.pathway_lr_multiplier"]), tmp_path / "page.md"
    _write_all(tmp_path / "runs")
    page.write_text(PAGE)
    call = ["choose", str(grid), "--runs_dir", str(tmp_path / "runs"), "--into", str(page)]
    assert main(call) == 0
    once = page.read_text()
    assert "| dar-layer | pathway.beta_pattern = layer | 3 |" in once
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert main(call) == 0
    assert page.read_text() == once
    for broken in ("no markers\n", PAGE * 2, PAGE.replace("begin", "end")):
        page.write_text(broken)
        with pytest.raises(DarlitError, match=r"page\.md needs one line '<!-- begin: darlit grid choose pick -->'"):
            main(call)
        assert page.read_text() == broken


def test_finished_runs_are_kept_and_never_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out, grid = tmp_path / "runs", tmp_path / "kept", _grid(tmp_path)
    call = ["collect", str(grid), "--runs_dir", str(runs), "--out", str(out)]
    first = _write(runs, CELLS[0], 10, 2.0)
    (runs / CELLS[1] / "seed_10").mkdir(parents=True)  # begun, not finished
    assert main(call) == 0
    assert "1 of 9 runs in" in capsys.readouterr().out
    kept = out / CELLS[0] / "seed_10.json"
    assert kept.read_bytes() == first.read_bytes()
    assert [path for path in out.rglob("*") if path.is_file()] == [kept]
    assert main(["choose", str(grid), "--runs_dir", str(out)]) == 0

    _write(runs, CELLS[1], 11, 2.0)
    first.write_text(json.dumps(make_summary("tiny", "dar-default", 10, val_loss_final=1.9)))
    with pytest.raises(DarlitError, match=r"seed_10\.json is of another run than .* add --replace"):
        main(call)
    assert json.loads(kept.read_text())["val_loss_final"] == 2.0
    assert not (out / CELLS[1]).exists()
    assert main([*call, "--replace"]) == 0
    assert json.loads(kept.read_text())["val_loss_final"] == 1.9
    assert (out / CELLS[1] / "seed_11.json").exists()


def test_a_loss_that_is_not_of_the_last_step_is_taken_when_told_so_and_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, runs = _grid(tmp_path), tmp_path / "runs"
    short = {part: values[:-1] for part, values in make_summary("tiny", "x", 0)["curve"]["val"].items()}
    file = _write(runs, CELLS[0], 10, 2.0, curve__val=short, pathway={"name": "dar", "beta_pattern": "branch"})
    _write(runs, CELLS[1], 11, 2.0, pathway={"name": "dar", "beta_pattern": "layer"})
    with pytest.raises(DarlitError, match=f"{file}: was validated last at step 50 of 100"):
        main(["choose", str(grid), "--runs_dir", str(runs)])
    with pytest.raises(DarlitError, match=f"{file}: was validated last at step 50 of 100"):
        main(["collect", str(grid), "--runs_dir", str(runs), "--out", str(tmp_path / "kept")])
    assert not (tmp_path / "kept").exists()
    assert main(["choose", str(grid), "--runs_dir", str(runs), "--partial"]) == 0
    table = capsys.readouterr().out
    assert "| dar-default | — | 1 of 3 | 2.0000 (at step 50 of 100) | — | — |" in table
    assert "| dar-layer | pathway.beta_pattern = layer | 1 of 3 | 2.0000 | — | — |" in table


def test_runs_are_collected_beside_themselves_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in results/runs of the clone that one types in, which holds what is committed."""
    grid, first = _grid(tmp_path), _write(tmp_path / "runs", CELLS[0], 10, 2.0)
    monkeypatch.chdir(tmp_path)
    assert main(["collect", str(grid)]) == 0
    assert (tmp_path / "runs/results/runs" / CELLS[0] / "seed_10.json").read_bytes() == first.read_bytes()
    assert not (tmp_path / "results").exists()
