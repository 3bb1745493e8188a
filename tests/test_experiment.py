"""Experiment files: base chains, merging, and errors that name the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cells import fit, run_folder, summary, write_cell
from darlit.__main__ import main
from darlit.experiment import (
    BACKBONE,
    PATHWAY,
    ExperimentError,
    inner,
    load_experiment,
    load_experiments,
    nested,
    shortened,
)
from darlit.grid.cells import read_grid

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_bases_merge_in_order_and_own_keys_win(tmp_path: Path) -> None:
    write(tmp_path, "parts/one.yaml", "a: {x: 1, y: 1}\nlist: [1, 2]\n")
    write(tmp_path, "parts/two.yaml", "a: {y: 2, z: 2}\n")
    top = write(tmp_path, "top.yaml", "base: [parts/one.yaml, parts/two.yaml]\na: {z: 3}\nlist: [9]\n")
    assert load_experiment(top) == {"a": {"x": 1, "y": 2, "z": 3}, "list": [9]}


def test_base_is_relative_to_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "configs/deep/leaf.yaml", "value: leaf\n")
    write(tmp_path, "configs/middle.yaml", "base: deep/leaf.yaml\n")
    top = write(tmp_path, "experiments/top.yaml", "base: [../configs/middle.yaml]\n")
    monkeypatch.chdir(tmp_path / "configs")
    assert load_experiment(top) == {"value": "leaf"}


def test_later_files_win(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", "a: {x: 1, y: 1}\n")
    two = write(tmp_path, "two.yaml", "a: {y: 2}\n")
    assert load_experiments([one, two]) == {"a": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: [missing.yaml]\n", ["top.yaml", "missing.yaml", "does not exist"]),
        ("base: [top.yaml]\n", ["loops", "top.yaml -> top.yaml"]),
        ("base: [loop.yaml]\n", ["loops", "top.yaml -> loop.yaml -> top.yaml"]),
        ("base: {a: 1}\n", ["top.yaml", "list of paths"]),
        ("- a\n- b\n", ["top.yaml", "mapping"]),
        ("a: [1\n", ["top.yaml", "YAML"]),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    write(tmp_path, "loop.yaml", "base: [top.yaml]\n")
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(tmp_path, "top.yaml", text))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def with_layers(layers: Any) -> dict[str, Any]:
    return nested({f"{PATHWAY}.block_size": "auto", f"{BACKBONE}.num_layers": layers})


@pytest.mark.parametrize(
    ("layers", "block_size"), [(1, 2), (4, 2), (8, 2), (12, 2), (16, 2), (17, 3), (24, 3), (25, 4), (64, 8), ("24", 3)]
)
def test_block_size_auto_is_about_eight_blocks_of_two_layers_or_more(
    layers: Any, block_size: int, tmp_path: Path
) -> None:
    file = write(tmp_path, "cell.yaml", yaml.safe_dump(with_layers(layers)))
    assert inner(load_experiment(file), PATHWAY) == {"block_size": block_size}


def test_the_depth_of_the_last_file_counts_for_block_size_auto(tmp_path: Path) -> None:
    first = write(tmp_path, "first.yaml", yaml.safe_dump(with_layers(8)))
    deeper = write(tmp_path, "deeper.yaml", yaml.safe_dump(nested({f"{BACKBONE}.num_layers": 32})))
    assert inner(load_experiments([first, deeper]), PATHWAY)["block_size"] == 4
    changes = nested({f"{BACKBONE}.num_layers": 24})
    assert inner(load_experiments([first, deeper], changes), PATHWAY)["block_size"] == 3


@pytest.mark.parametrize("layers", [None, "many", 0, 2.0, True])
def test_block_size_auto_without_a_depth_is_one_line(layers: Any, tmp_path: Path) -> None:
    content = nested({f"{PATHWAY}.block_size": "auto"}) if layers is None else with_layers(layers)
    file = write(tmp_path, "cell.yaml", yaml.safe_dump(content))
    with pytest.raises(ExperimentError, match="block_size=auto is worked out from backbone.num_layers, which is"):
        load_experiment(file)


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_resolves_and_is_a_handful_of_lines(path: Path) -> None:
    config = load_experiment(path)
    assert {"model", "data", "budget", "trainer"} <= set(config)
    assert "class_path" in config["model"]
    assert len(path.read_text().splitlines()) <= 12


def test_a_shortened_run_says_so_and_its_record_too(tmp_path, data_folder, monkeypatch, capsys):
    cell = write_cell(tmp_path, data_folder, "residual")
    (tmp_path / "few.yaml").write_text("groups: {few: {cells: [micro_residual], seeds: [0], budget: {tokens: 1280}}}\n")
    monkeypatch.setenv("DARLIT_MAX_STEPS", "2")
    assert fit(cell) == 0
    said = "DARLIT_MAX_STEPS=2: runs are shortened to 2 steps, to try commands out; they are not results\n"
    assert capsys.readouterr().out.startswith(said)
    assert yaml.safe_load((run_folder(cell) / "config.yaml").read_text())["budget"]["tokens"] == 2 * 256
    assert summary(run_folder(cell))["budget"]["steps"] == 2
    (task,) = read_grid(tmp_path / "few.yaml").tasks
    assert (task.cell.changes, task.cell.config["budget"]["tokens"]) == ({"budget.tokens": 512}, 512)
    assert main(["grid", "run", str(tmp_path / "few.yaml"), f"--runs_dir={tmp_path / 'runs'}"]) == 0
    assert capsys.readouterr().out.startswith(said)
    monkeypatch.delenv("DARLIT_MAX_STEPS")
    assert read_grid(tmp_path / "few.yaml").tasks[0].cell.changes == {"budget.tokens": 1280}


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "٣"])
def test_a_shortening_that_is_no_number_is_named(tmp_path, data_folder, monkeypatch, capsys, value):
    monkeypatch.setenv("DARLIT_MAX_STEPS", value)
    assert main(["fit", "--config", str(write_cell(tmp_path, data_folder, "residual"))]) == 2
    error = capsys.readouterr().err
    assert f"DARLIT_MAX_STEPS={value!r} is not allowed" in error
    assert error.count("\n") == 1


def test_a_shortening_never_lengthens_and_needs_a_budget(monkeypatch):
    monkeypatch.setenv("DARLIT_MAX_STEPS", "5")
    assert shortened({"budget": {"tokens": 100, "batch_tokens": 50}}, "x")["budget"]["tokens"] == 100
    with pytest.raises(ExperimentError, match=r"^x: DARLIT_MAX_STEPS needs budget.tokens and budget.batch_tokens"):
        shortened({"budget": {"tokens": 100}}, "x")
