"""Settings by their types: the same in fit, plan and grid check, however they were spelled."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from lightning.pytorch import Trainer

from cells import summary, write_cell
from darlit.cli import main
from darlit.data.datamodule import TokenDataModule
from darlit.data.options import DataOptions
from darlit.errors import DarlitError
from darlit.experiment import load_experiment, load_experiments, load_parts, merge
from darlit.fields import field_types
from darlit.grid.cells import read_grid
from darlit.grid.equal_budget import check_grid
from darlit.grid.estimate import Machine, plan_cell
from darlit.grid.slurm import ClusterOptions
from darlit.settings import LINKED, TRAINER_DEFAULTS, TrainerOptions, _trainer_names, complete, read_options, typed

SPELLED = {
    "plain": "{norm_eps: 0.000001, tie_embeddings: false, width: 32, num_heads: 2, ffn_width: 48}",
    "odd": '{norm_eps: 1e-6, tie_embeddings: "false", width: 032, num_heads: "2", ffn_width: 4.8e1}',
}
BUDGET = {"plain": "{tokens: 1000000, batch_tokens: 1000}", "odd": "{tokens: 1e6, batch_tokens: 1e3}"}


def _cell(folder: Path, name: str, spelling: str, class_path: str = "ResidualLM") -> Path:
    path = folder / f"tiny_{name}.yaml"
    path.write_text(
        f"model:\n  class_path: {class_path}\n  init_args:\n    backbone: {SPELLED[spelling]}\n"
        f"data: {{sequence_length: 50, batch_size: 20}}\nbudget: {BUDGET[spelling]}\n"
        "trainer: {accelerator: cpu, precision: 32}\n"
    )
    return path


def _grid(folder: Path, text: str) -> Path:
    path = folder / "grid.yaml"
    path.write_text(text)
    return path


def test_spellings_of_one_value_are_one_value_in_plan_and_in_the_equal_budget_check(tmp_path: Path) -> None:
    _cell(tmp_path, "residual", "plain")
    _cell(tmp_path, "dar_full", "odd", "DualAttentionResidualLM")
    grid = read_grid(_grid(tmp_path, "groups: {tiny: {cells: [tiny_residual, tiny_dar_full], seeds: [0, 010]}}"))
    assert [task.seed for task in grid.tasks] == [0, 10, 0, 10]
    assert list(check_grid(grid)) == ["tiny"]
    first, second = (plan_cell(cell, Machine(), memory="none") for cell in grid.cells)
    assert first.parameters.total - first.parameters.pathway == second.parameters.total - second.parameters.pathway
    assert (first.tokens, first.batch_tokens) == (second.tokens, second.batch_tokens) == (1_000_000, 1000)


def test_fit_builds_what_plan_counts(tmp_path: Path, data_folder: Path) -> None:
    file = write_cell(
        tmp_path,
        data_folder,
        model__init_args__backbone={"width": "32", "num_heads": 2.0, "num_layers": "2", "tie_embeddings": "false"},
        budget__tokens="5.12e2",
    )
    text = file.read_text().replace("tie_embeddings: 'false'", 'tie_embeddings: "false"\n      norm_eps: 1e-6')
    file.write_text(text)
    cell = read_grid(_grid(tmp_path, "groups: {a: {cells: [micro_dar_full], seeds: [0]}}")).cells[0]
    planned = plan_cell(cell, Machine(), memory="none").parameters.total
    assert main(["fit", "--config", str(file)]) == 0
    saved = load_experiment(tmp_path / "runs" / "micro_dar_full" / "seed_0" / "config.yaml")
    assert saved["model"]["init_args"]["backbone"]["tie_embeddings"] is False
    assert saved["budget"]["tokens"] == 512
    assert summary(tmp_path / "runs" / "micro_dar_full" / "seed_0")["parameters"]["total"] == planned


def test_the_budget_of_a_group_is_typed(tmp_path: Path) -> None:
    _cell(tmp_path, "residual", "plain")
    text = "groups: {tiny: {cells: [tiny_residual], seeds: [0], budget: {tokens: %s}}}"
    grid = read_grid(_grid(tmp_path, text % "2e6"))
    assert grid.cells[0].config["budget"]["tokens"] == 2_000_000
    with pytest.raises(DarlitError, match="group 'tiny': budget.tokens='many' is not allowed"):
        read_grid(_grid(tmp_path, text % "many"))


def test_a_default_that_is_written_out_equals_one_that_is_not() -> None:
    said = {"model": {"class_path": "ResidualLM", "init_args": {"optimizer": {"beta1": 0.9}}}, "trainer": {}}
    unsaid = {"model": {"class_path": "ResidualLM"}, "data": {"batch_size": 16}}
    assert complete(said) == complete(unsaid) == complete(complete(said))
    assert typed(unsaid) == {**unsaid, "model": {"class_path": "ResidualLM", "init_args": {}}}


@pytest.mark.parametrize(
    "options",
    [
        ["--trainer", "{max_steps: 3, accumulate_grad_batches: 4}"],
        ["--trainer=FILE"],
        ["--trainer.max_steps", "3"],
        ["--trainer.accumulate_grad_batches=4"],
        ["--data", "{seed: 5}"],
        ["--data.seed=5"],
        ["--model.init_args", "{backbone: {sequence_length: 64}}"],
        ["--model", "{class_path: ResidualLM, init_args: {backbone: {sequence_length: 64}}}"],
        ["--model.backbone", "{sequence_length: 64}"],
    ],
    ids=lambda options: " ".join(options),
)
def test_a_linked_value_is_seen_however_it_was_spelled(tmp_path: Path, data_folder: Path, options: list[str]) -> None:
    file = tmp_path / "trainer.yaml"
    file.write_text("max_steps: 3\n")
    options = [option.replace("FILE", str(file)) for option in options]
    with pytest.raises(DarlitError, match="cannot be set by hand"):
        main(["fit", "--config", str(write_cell(tmp_path, data_folder)), *options])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("seed", ["true", "false", "-1", "1.5", "null", "4294967296"])
def test_seeds_are_whole_numbers_from_zero(tmp_path: Path, data_folder: Path, seed: str) -> None:
    with pytest.raises(DarlitError, match="seed_everything=.* is not allowed; seed_everything must be a whole number"):
        main(["fit", "--config", str(write_cell(tmp_path, data_folder)), f"--seed_everything={seed}"])
    assert not (tmp_path / "runs").exists()


def test_seed_and_folder_agree(tmp_path: Path, data_folder: Path) -> None:
    cell = write_cell(tmp_path, data_folder, seed_everything="00", budget__tokens=256)
    assert main(["fit", "--config", str(cell)]) == 0
    assert [path.name for path in (tmp_path / "runs" / "micro_dar_full").iterdir()] == ["seed_0"]
    assert load_experiment(tmp_path / "runs/micro_dar_full/seed_0/config.yaml")["seed_everything"] == 0


def test_another_class_keeps_nothing_of_the_options_of_the_first(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(
        "model:\n  class_path: DualAttentionResidualLM\n  init_args:\n"
        "    pathway: {block_size: 2, rho_logit: 1.0}\n    backbone: {width: 64}\n"
    )
    top = tmp_path / "top.yaml"
    top.write_text("base: base.yaml\nmodel: {class_path: AttentionResidualLM}\n")
    assert load_experiment(top)["model"]["init_args"] == {"backbone": {"width": 64}}
    top.write_text(
        "base: base.yaml\nmodel: {class_path: AttentionResidualLM, init_args: {pathway: {num_queries: 1}}}\n"
    )
    assert load_experiment(top)["model"]["init_args"]["pathway"] == {"num_queries": 1}
    assert complete(load_experiment(top))["model"]["init_args"]["pathway"]["block_size"] == 0
    top.write_text("base: base.yaml\nmodel: {class_path: darlit.modules.dual_attention.DualAttentionResidualLM}\n")
    assert load_experiment(top)["model"]["init_args"]["pathway"]["block_size"] == 2
    given, _ = read_options(["--model", "AttentionResidualLM"])
    assert "pathway" not in merge(load_experiments([base]), given)["model"]["init_args"]


def test_arguments_of_another_strategy_are_dropped_too(tmp_path: Path) -> None:
    below = {"trainer": {"strategy": {"class_path": "a.FSDP", "init_args": {"size": 2}}}}
    assert merge(below, {"trainer": {"strategy": {"class_path": "b.DDP"}}}) == {
        "trainer": {"strategy": {"class_path": "b.DDP", "init_args": {}}}
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"buget": {}}, "an experiment has no key 'buget'; did you mean budget?"),
        ({"budget": {"token": 3}}, "budget has no option 'token'; did you mean tokens?"),
        ({"data": {"bath_size": 3}}, "data has no option 'bath_size'; did you mean batch_size?"),
        ({"trainer": {"precison": "32"}}, "trainer has no option 'precison'; did you mean precision?"),
        ({"model": {"class_path": "ResidualML"}}, "model.class_path is 'ResidualML'; did you mean ResidualLM?"),
        ({"model": {"class_path": "ResidualLM", "init_args": {"pathway": None}}}, "pathway is null; leave it out"),
        (
            {"model": {"class_path": "ResidualLM", "init_arg": {}}},
            "model has no key 'init_arg'; did you mean init_args?",
        ),
        ({"model": {"init_args": {}}}, "name a class"),
        ({"data": None}, "data is null; leave it out"),
        ({"trainer": 3}, "trainer is 3; leave it out"),
    ],
)
def test_a_wrong_key_or_group_is_one_line_in_every_verb(config: dict[str, Any], said: str) -> None:
    for read in (typed, complete):
        with pytest.raises(DarlitError) as caught:
            read(config)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_grid_files_name_the_nearest_key_and_the_key_given_twice(tmp_path: Path) -> None:
    with pytest.raises(DarlitError, match="group 'a' has no key 'seed'; did you mean seeds?"):
        read_grid(_grid(tmp_path, "groups: {a: {cells: [x], seeds: [0], seed: [0]}}"))
    for twice in ("groups:\n  a: {cells: [x], seeds: [0]}\n  a: {cells: [y], seeds: [0]}\n",
                  "groups:\n  a:\n    cells: [x]\n    seeds: [0]\n    seeds: [1]\n"):  # fmt: skip
        with pytest.raises(DarlitError, match=r"grid.yaml, line \d: key '\w+' is given twice, first in line \d"):
            read_grid(_grid(tmp_path, twice))


def test_plan_and_grid_check_import_no_lightning(tmp_path: Path) -> None:
    _cell(tmp_path, "residual", "odd")
    grid = _grid(tmp_path, "groups: {tiny: {cells: [tiny_residual], seeds: [0]}}")
    code = (
        "import sys; from darlit.__main__ import main\n"
        "for verb in (['plan', '--quick'], ['grid', 'check'], ['grid', 'plan', '--quick']):\n"
        f"    assert not main([*verb, {str(grid)!r}])\n"
        "sys.exit('lightning' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_data_options_are_the_arguments_of_the_datamodule() -> None:
    parameters = inspect.signature(TokenDataModule.__init__).parameters
    hints = get_type_hints(TokenDataModule.__init__)
    expected = {name: (hints[name], parameter.default) for name, parameter in parameters.items() if name != "self"}
    defaults = DataOptions()
    assert {name: (hint, getattr(defaults, name)) for name, hint in field_types(DataOptions).items()} == expected


def test_what_is_read_of_the_trainer_is_an_argument_of_it() -> None:
    arguments = set(inspect.signature(Trainer).parameters)
    assert set(_trainer_names()) == arguments
    linked = {name.removeprefix("trainer.") for name in LINKED if name.startswith("trainer.")}
    assert {*field_types(TrainerOptions), *TRAINER_DEFAULTS, *linked} <= arguments


def test_times_of_a_cluster_file_are_text(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("time: 24:00:00\ngpus: 010\n")
    assert ClusterOptions.read(file) == ClusterOptions(time="24:00:00", gpus=10)
    file.write_text("tiem: 24:00:00\n")
    with pytest.raises(DarlitError, match=r"cluster.yaml: unknown key 'tiem'; did you mean time\?"):
        ClusterOptions.read(file)


@pytest.mark.parametrize(
    ("options", "block_size"),
    [
        (["--model.init_args.backbone.num_layers=24"], 3),
        (["--model.backbone.num_layers", "24"], 3),
        (["--model.init_args.backbone={num_layers: 24, width: 64}"], 3),
        (["--model", "{init_args: {backbone: {num_layers: 24}}}"], 3),
        (["--model.backbone.num_layers=8", "--model.init_args.backbone.num_layers=2.4e1"], 3),
        (["--model.pathway.block_size=4"], 4),
        (["--model.init_args.pathway.block_size=4", "--model.pathway.block_size=auto"], 2),
        (["--model.pathway={block_size: auto, route: self_kv}", "--model.backbone.num_layers=40"], 5),
    ],
)
def test_block_size_auto_and_depth_may_be_options_in_any_spelling(options: list[str], block_size: int) -> None:
    root = Path(__file__).parents[1] / "configs"
    files = load_parts([root / "size" / "tiny.yaml", root / "arm" / "dar_block.yaml"])
    config = typed(merge(files, read_options(options)[0]))
    assert config["model"]["init_args"]["pathway"]["block_size"] == block_size


def test_help_needs_no_valid_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--budget.tokens", "many", "--help"])
    assert ended.value.code == 0
    assert "--budget.tokens" in capsys.readouterr().out
