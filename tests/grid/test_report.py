"""The page of results: what it says of a part of a grid, of the paper's claims, of the clock, and of notes by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from darlit.grid.results import main
from grid.fakes import write_cell_file, write_loss

GRID = "groups: {tiny: {cells: [tiny_residual, tiny_dar_full, tiny_dar_self_kv, tiny_hc2], seeds: [0, 1, 2]}}\n"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Residual and dar_full under three seeds, dar_self_kv under two, hc2 not yet."""
    for seed, (base, dar) in enumerate([(2.00, 1.90), (2.02, 1.91), (2.01, 1.92)]):
        write_loss(tmp_path / "runs", "residual", seed, [5.0, 4.0, 3.0, base])
        write_loss(tmp_path / "runs", "dar_full", seed, [5.0, 4.0, 3.0, dar])
    for seed, loss in enumerate([1.80, 2.20]):
        write_loss(tmp_path / "runs", "dar_self_kv", seed, [5.0, 4.0, 3.0, loss])
    return tmp_path / "runs"


def _page(runs: Path, *options: str) -> str:
    out = runs.parent / "results"
    assert main([str(runs), "--out", str(out), "--figures", "none", *options]) == 0
    return (out / "README.md").read_text()


def _write_grid(folder: Path) -> Path:
    for arm in ("residual", "dar_full", "dar_self_kv", "hc2"):
        write_cell_file(folder, f"tiny_{arm}")
    (folder / "grid.yaml").write_text(GRID)
    return folder / "grid.yaml"


def test_a_part_of_a_grid_says_that_it_is_one(tmp_path: Path, runs: Path) -> None:
    assert "**Partial: 8 of 12 runs are finished." in _page(runs, f"--grid={_write_grid(tmp_path)}")
    write_loss(runs, "dar_self_kv", 2, [5.0, 4.0, 3.0, 2.0])
    assert "Partial" not in _page(runs)


def test_claims_stand_beside_our_paired_difference(tmp_path: Path, runs: Path) -> None:
    row = r"^\| (.*) \| (.*) \| (\w+) − (\w+) \| (\d) \| (.*) \| (.*) \| (.*) \|$"
    rows = re.findall(row, _page(runs), re.MULTILINE)
    found = {(lower, higher): rest for _, _, lower, higher, *rest in rows}
    assert set(found) == {("dar_full", "residual"), ("dar_full", "dar_self_kv")}
    # -0.10, -0.11, -0.09: mean -0.1, sd 0.01, t(0.95, 2) = 4.302653, half width 0.024841.
    assert found["dar_full", "residual"] == ["3", "−4.98", "−0.1000 [−0.1248, −0.0752]", "holds"]
    # +0.10, -0.29: mean -0.095, sd 0.275772, t(0.95, 1) = 12.7062, half width 2.477709.
    assert found["dar_full", "dar_self_kv"] == ["2", "−4.75", "−0.0950 [−2.5727, +2.3827]", "not decided"]
    assert all(claim[1].startswith("the paper") for claim in rows)


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [([1.5], "one seed decides nothing"), ([2.2, 2.22, 2.21], "the reverse holds"), ([], "no run yet")],
)
def test_a_claim_is_judged_by_its_interval(tmp_path: Path, losses: list[float], verdict: str) -> None:
    runs = tmp_path / "runs"
    for seed, base in enumerate([2.00, 2.01, 2.02]):
        write_loss(runs, "residual", seed, [5.0, 4.0, 3.0, base])
    for seed, loss in enumerate(losses):
        write_loss(runs, "dar_full", seed, [5.0, 4.0, 3.0, loss])
    page = _page(runs, f"--grid={_write_grid(tmp_path)}")
    line = next(line for line in page.splitlines() if "dar_full − residual" in line)
    assert line.endswith(f"| {verdict} |")


def test_a_persons_words_are_a_part_of_the_page(runs: Path) -> None:
    assert "In words" not in _page(runs)
    (runs.parent / "results" / "notes.md").write_text("What held: nothing much.\n")
    page = _page(runs)
    assert "## In words\n\nFrom `notes.md`, written by hand.\n\nWhat held: nothing much.\n\n## tiny" in page


def test_times_that_are_not_wall_time_say_so(tmp_path: Path) -> None:
    for arm in ("residual", "dar_full"):
        write_loss(tmp_path / "runs", arm, 0, [5.0, 4.0, 3.0, 2.0], clock="process")
    page = _page(tmp_path / "runs")
    assert "Times are the CPU time of a process with one thread" in page
    assert "precision: 32-true; clock: process" in page


def test_what_an_analysis_found_becomes_a_part_of_the_page(tmp_path: Path, runs: Path) -> None:
    assert "Inside the models" not in _page(runs)
    folder = tmp_path / "results" / "analysis"
    folder.mkdir()
    numbers = {"name": "tiny_dar_full", "cka": [[1.0, 0.25], [0.75, 0.5]], "streams": [0, 1], "tokens": 64}
    (folder / "cka.json").write_text(json.dumps({"analysis": "cka", "models": [numbers]}))
    page = _page(runs)
    assert "- tiny_dar_full: linear CKA of streams 0 and 1: equal depths 0.750, different depths 0.500" in page
    assert "![cka](analysis/cka.png)" in page
    assert (folder / "cka.png").read_bytes().startswith(b"\x89PNG")
