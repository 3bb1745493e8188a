"""``darlit plan`` and ``darlit grid plan`` count what the run itself will report, and say what is an estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from darlit.__main__ import main
from darlit.data.manifest import open_manifest
from darlit.errors import DarlitError
from darlit.grid.cells import read_grid
from darlit.grid.estimate import Machine, plan_cell
from darlit.modules.arms import DualAttentionResidualLM

REPOSITORY = Path(__file__).parents[2]
EXPERIMENTS = REPOSITORY / "experiments"
TINY: dict[str, Any] = {"vocab_size": 257, "num_layers": 4, "width": 128, "num_heads": 4, "ffn_width": 384}


def _grid(folder: Path, **changes: Any) -> Path:
    cell = {"base": str(EXPERIMENTS / "tiny_dar_full.yaml"), **changes}
    (folder / "tiny_dar_full.yaml").write_text(yaml.safe_dump(cell))
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"groups": {"tiny": {"cells": ["tiny_dar_full"], "seeds": [0, 1]}}}))
    return path


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_counts_are_those_of_the_model_that_will_be_built(tmp_path: Path) -> None:
    plan = plan_cell(read_grid(_grid(tmp_path)).cells[0], Machine(), memory="none")
    module: Any = DualAttentionResidualLM(
        pathway={"block_size": 1, "route": "dar"},  # type: ignore[arg-type]
        backbone=TINY,  # type: ignore[arg-type]
        optimizer={},  # type: ignore[arg-type]
    )
    assert plan.parameters.total == plan.parameters.active == sum(p.numel() for p in module.parameters())
    assert plan.parameters.pathway == sum(p.numel() for p in module.transformer.pathway.parameters())
    assert plan.steps == plan.tokens // plan.batch_tokens
    assert plan.flops == 2 * plan.tokens * plan.flops_per_token
    # Both streams of the embedding and of four layers, in float32.
    assert plan.history_bytes_per_token == 2 * 5 * 128 * 4


def test_the_sparse_headline_is_planned_without_a_gpu_and_without_megablocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = _json(capsys, str(EXPERIMENTS / "moe7b_dar.yaml"), "--gpus", "64", "--both")
    (plan,) = result["experiments"]
    assert plan["parameters"]["total"] == 6_919_231_608
    assert plan["parameters"]["active"] == 1_282_087_032
    assert (plan["strategy"], plan["precision"], plan["devices"]) == ("fsdp", "bf16-mixed", 64)
    kept, recomputed = plan["memory_bytes"]["kept"], plan["memory_bytes"]["recomputed"]
    assert kept["parameters"] == recomputed["parameters"] == 4 * -(-6_919_231_608 // 64)
    assert recomputed["activations"] < kept["activations"] / 3
    assert recomputed["total"] == sum(value for name, value in recomputed.items() if name != "total")
    assert plan["checkpoint_bytes"] == 12 * 6_919_231_608
    speed = 64 * 989e12 * 0.4 / plan["flops_per_token"]
    assert plan["tokens_per_second"] == pytest.approx(speed)
    assert plan["device_hours"] == pytest.approx(64 * plan["tokens"] / speed / 3600)


def test_every_figure_says_what_it_is_worth(capsys: pytest.CaptureFixture[str]) -> None:
    basis = _json(capsys, str(EXPERIMENTS / "tiny_residual.yaml"))["assumptions"]["basis"]
    assert len(basis) > 15
    assert all(text.startswith(("exact", "estimate")) for text in basis.values())


def test_options_change_what_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*options: str) -> dict[str, Any]:
        return _json(capsys, "dense0.1b_residual", "--quick", *options)["experiments"][0]

    one, eight = planned("--gpus", "1"), planned("--gpus", "8")
    assert eight["tokens_per_second"] == pytest.approx(8 * one["tokens_per_second"])
    assert eight["device_hours"] == pytest.approx(one["device_hours"])
    assert one["accumulation"] == 8 * eight["accumulation"]
    assert planned("--utilisation", "0.2")["device_hours"] == pytest.approx(2 * one["device_hours"])
    assert planned("--peak_tflops", "312")["device_hours"] == pytest.approx(989 / 312 * one["device_hours"])
    assert planned("--precision", "bf16-true")["checkpoint_bytes"] == one["checkpoint_bytes"] / 2
    assert planned("--strategy", "fsdp")["strategy"] == "fsdp"
    assert one["memory_bytes"] == {}


def test_passes_over_a_prepared_corpus_are_planned(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = open_manifest(data_folder).split("train")["tokens"]
    cell = tmp_path / "cell.yaml"
    content = {"base": str(EXPERIMENTS / "tiny_residual.yaml"), "data": {"folder": str(data_folder)}}
    cell.write_text(yaml.safe_dump({**content, "budget": {"tokens": 13 * 2048 * 20, "batch_tokens": 2048}}))
    (planned,) = _json(capsys, str(cell), "--quick")["experiments"]
    assert planned["train_tokens"] == tokens
    assert planned["passes"] == pytest.approx(13 * 2048 * 20 / tokens)
    assert main(["plan", str(cell), "--quick"]) == 0
    assert f"{13 * 2048 * 20 / tokens:.2f}" in capsys.readouterr().out
    (unprepared,) = _json(capsys, "dense0.1b_residual", "--quick")["experiments"]
    assert unprepared["passes"] is None


def test_weights_in_half_precision_are_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    def warned(precision: str) -> bool:
        result = _json(capsys, "dense0.1b_residual", "--quick", "--precision", precision)
        return any("gains that start at 1 do not move" in note for note in result["assumptions"]["notes"])

    assert warned("bf16-true")
    assert not warned("bf16-mixed")


def test_a_cpu_cell_has_no_speed_unless_its_peak_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXPERIMENTS / "tiny_residual.yaml")
    result = _json(capsys, file, "--quick")
    assert result["experiments"][0]["device"] == "cpu"
    assert result["experiments"][0]["tokens_per_second"] is None
    assert any("--peak_tflops" in note for note in result["assumptions"]["notes"])
    assert _json(capsys, file, "--quick", "--peak_tflops", "0.1")["total"]["device_hours"] > 0


def test_a_grid_is_planned_by_both_verbs_alike(capsys: pytest.CaptureFixture[str]) -> None:
    grid = str(EXPERIMENTS / "grids" / "dense.yaml")
    assert main(["grid", "plan", grid, "--only", "dense1b_*", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "1,026,092,800" in printed
    assert "11 cells" in printed
    assert main(["grid", "plan", str(EXPERIMENTS / "grids" / "moe7b.yaml"), "--quick"]) == 0
    printed = capsys.readouterr().out
    assert main(["plan", str(EXPERIMENTS / "grids" / "moe7b.yaml"), "--quick"]) == 0
    assert capsys.readouterr().out == printed


def test_totals_are_over_cells_and_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(capsys, str(EXPERIMENTS / "grids" / "first.yaml"), "--quick", "--gpus", "1")
    plans, total = result["experiments"], result["total"]
    assert total["runs"] == 6
    assert total["tokens"] == 6 * 102_400
    assert total["device_hours"] == pytest.approx(sum(2 * plan["device_hours"] for plan in plans))
    assert total["flops"] == sum(2 * plan["tokens"] * plan["flops_per_token"] for plan in plans)


def test_tables_mark_what_the_experiment_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXPERIMENTS / "tiny_residual.yaml"), str(EXPERIMENTS / "tiny_dar_full.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "888,348" in printed
    assert "2 cells" in printed
    assert "activations" in printed
    assert "*" in printed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"class_path": "NoSuchLM"}}, "model.class_path is 'NoSuchLM'; allowed are "),
        (
            {"model": {"class_path": "argparse.Namespace"}},
            "'argparse.Namespace', which is not a darlit.modules.LanguageModule",
        ),
        ({"model": {"class_path": "argparse.Nothing"}}, "has no attribute 'Nothing'"),
        ({"model": {"init_args": {"pathway": {"block_size": 9}}}}, "block_size"),
        ({"budget": {"tokens": "many"}}, "budget.tokens='many' is not allowed"),
        ({"budget": {"batch_tokens": 2049}}, "budget.batch_tokens=2049 is not a multiple of 2048 (devices 1 x "),
        ({"trainer": {"precision": "16-mixed"}}, "precision '16-mixed' is not known"),
    ],
)
def test_a_cell_that_cannot_be_built_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    cell = read_grid(_grid(tmp_path, **changes)).cells[0]
    with pytest.raises(DarlitError) as error:
        plan_cell(cell, Machine(), memory="none")
    assert str(error.value).startswith(str(tmp_path / "tiny_dar_full.yaml"))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "0"], "--gpus 0 is not allowed"),
        (["--utilisation", "1.5"], "--utilisation 1.5 is not allowed"),
        (["--peak_tflops", "0"], "--peak_tflops 0.0 is not allowed"),
    ],
)
def test_bad_options_are_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXPERIMENTS / "tiny_residual.yaml"), *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_memory_is_counted_as_the_experiment_has_its_layers_or_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    def counted(*options: str) -> dict[str, Any]:
        return _json(capsys, "tiny_dar_block", *options)["experiments"][0]["memory_bytes"]

    own, both = counted(), counted("--both")
    assert list(own) == ["kept"]
    assert list(both) == ["kept", "recomputed"]
    assert own["kept"] == both["kept"]
    assert counted("--quick") == {}


def test_a_plan_imports_no_lightning_which_takes_longer_than_the_plan() -> None:
    code = (
        "import sys; from darlit.__main__ import main; "
        f"status = main(['plan', {str(EXPERIMENTS / 'tiny_dar_full.yaml')!r}, '--quick']); "
        "sys.exit(status or 'lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_missing_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "no_such.yaml"]) == 2
    assert "'no_such.yaml' does not exist" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    """The options are parsed before anything heavy is imported."""
    code = "import sys; import darlit.grid.plan; sys.exit(bool({'torch', 'lightning', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


IDEA = """
from dataclasses import dataclass
from darlit.backbone import BackboneConfig
from darlit.modules import LanguageModule, OptimizerConfig
from darlit.pathways.contract import PathwayOptions
from darlit.pathways.residual import Residual

class Mine(Residual):
    name = "mine"
    cost = Residual.__mro__[1].cost  # as a pathway that does not state it

class MineLM(LanguageModule):
    pathway_name = "mine"
    def __init__(self, pathway: PathwayOptions = PathwayOptions(), backbone: BackboneConfig = BackboneConfig(),
                 optimizer: OptimizerConfig = OptimizerConfig()) -> None:
        super().__init__(pathway, backbone, optimizer)
"""


def test_an_idea_of_your_own_that_states_no_cost_is_planned(tmp_path: Path) -> None:
    """In a process of its own, because a pathway stays known once it is defined."""
    (tmp_path / "my_ideas.py").write_text(IDEA)
    experiment = tmp_path / "tiny_mine.yaml"
    experiment.write_text(
        yaml.safe_dump(
            {
                "base": str(EXPERIMENTS.parent / "configs" / "size" / "tiny.yaml"),
                "model": {"class_path": "my_ideas.MineLM"},
            }
        )
    )
    command = [sys.executable, "-m", "darlit", "plan", experiment.name, "--quick"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "not stated" in result.stdout
    experiment.write_text(experiment.read_text().replace("my_ideas", "no_ideas"))
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert "no_ideas" in result.stderr
    assert "Traceback" not in result.stderr
