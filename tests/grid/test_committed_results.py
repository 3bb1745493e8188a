"""What the repository says about its runs is what their committed summaries give, byte for byte."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from darlit.grid.cells import read_grid
from darlit.grid.commands import main as grid_main
from darlit.grid.equal_budget import check_grid
from darlit.grid.results import main as results_main
from darlit.grid.summary import SummaryError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
GRID = ROOT / "experiments" / "grids" / "small.yaml"
NOT_GENERATED = {"bench", "runs", "screening", "notes.md"}
CHOICES = {
    "experiments/screening/learning_rate.yaml": ("docs/experiments.md",),
    "experiments/screening/dar_options.yaml": ("docs/pathways.md",),
    "experiments/screening/dar_block_carry.yaml": ("docs/pathways.md",),
}


@pytest.mark.parametrize("grid", CHOICES)
def test_tables_of_choices(grid: str, tmp_path: Path) -> None:
    assert check_grid(read_grid(ROOT / grid))
    page = tmp_path / "page.md"
    shutil.copy(ROOT / CHOICES[grid][0], page)
    call = ["choose", str(ROOT / grid), f"--runs_dir={RESULTS / 'screening'}", f"--into={page}", *CHOICES[grid][1:]]
    assert grid_main(call) == 0
    assert page.read_bytes() == (ROOT / CHOICES[grid][0]).read_bytes()


def _generated(folder: Path) -> dict[Path, bytes]:
    parts = [part for part in folder.iterdir() if part.name not in NOT_GENERATED]
    files = [file for part in parts for file in ([part] if part.is_file() else part.rglob("*")) if file.is_file()]
    return {file.relative_to(folder): file.read_bytes() for file in files}


no_runs_yet = pytest.mark.skipif(not (RESULTS / "runs").is_dir(), reason="no run of the evidence grid is finished yet")


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of results/ once more, from its summaries, its notes and the numbers of its analyses; and README's table."""
    folder = tmp_path_factory.mktemp("again")
    out = folder / "results"
    out.mkdir()
    shutil.copy(RESULTS / "notes.md", out)
    page = Path(shutil.copy(ROOT / "README.md", folder))
    for numbers in (RESULTS / "analysis").glob("*.json"):
        (out / "analysis").mkdir(exist_ok=True)
        shutil.copy(numbers, out / "analysis")
    assert results_main([str(RESULTS / "runs"), f"--out={out}", f"--grid={GRID}", f"--into={page}"]) == 0
    return folder


@no_runs_yet
def test_the_table_in_the_readme(again: Path) -> None:
    assert (again / "README.md").read_bytes() == (ROOT / "README.md").read_bytes()


@no_runs_yet
def test_texts_and_tables(again: Path) -> None:
    committed, made = _generated(RESULTS), _generated(again / "results")
    assert set(committed) == set(made)
    assert {str(file) for file in made} >= {
        "README.md",
        "table.md",
        "table.csv",
        "table.tex",
        "figures/size_small.png",
    }
    for file in made:
        if file.suffix != ".png":
            assert committed[file] == made[file], file


@no_runs_yet
def test_figures(again: Path) -> None:
    import matplotlib as mpl

    drawn_with = re.search(r"^matplotlib==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert drawn_with is not None
    if mpl.__version__ != drawn_with[1]:
        pytest.skip(f"drawn with matplotlib {drawn_with[1]}; {mpl.__version__} draws other pixels")
    for file, picture in _generated(again / "results").items():
        if file.suffix == ".png":
            assert picture == (RESULTS / file).read_bytes(), file


def test_no_run_is_from_a_changed_checkout() -> None:
    for file in sorted([*(RESULTS / "runs").rglob("*.json"), *(RESULTS / "screening").rglob("*.json")]):
        assert re.search(r'"git_revision": "[0-9a-f]{40}"', file.read_text()), file


def test_no_path_of_a_machine_is_in_the_results() -> None:
    for file in sorted(RESULTS.rglob("*.json")):
        assert not re.search(r'"(/|~|[A-Za-z]:\\)', file.read_text()), file


def test_results_reject_a_sweep_that_ends_before_its_last_step(tmp_path: Path) -> None:
    """The committed sweep without its last validation, as it was before darlit validated the last step."""
    for cell in sorted((RESULTS / "screening").glob("small_residual-lr*")):
        file = shutil.copytree(cell, tmp_path / cell.name / cell.name) / "seed_100.json"
        summary = json.loads(file.read_text())
        for values in summary["curve"]["val"].values():
            values.pop()
        file.write_text(json.dumps(summary))
        with pytest.raises(SummaryError, match=f"{cell.name}/seed_100.json: was validated last at step 100 of 125"):
            results_main([str(tmp_path / cell.name), f"--out={tmp_path / 'out'}", "--figures=none"])
    assert not (tmp_path / "out").exists()
