"""fit, validate, test, predict through the real command line: resume, overrides, links, saved config, errors."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cells import ARMS, INTERRUPTED, STEPS, fit, interrupt_after, run_folder, summary, weights, write_cell
from darlit.__main__ import main as darlit
from darlit.errors import DarlitError
from darlit.grid.summary import TIMING_FIELDS, validate


def without_timing(content: dict[str, Any]) -> dict[str, Any]:
    for field in TIMING_FIELDS:
        *parents, last = field.split(".")
        inner = content
        for parent in parents:
            inner = inner[parent]
        inner.pop(last)
    return content


@pytest.mark.parametrize(("arm", "cut"), [*((arm, 7) for arm in ARMS), ("dar_full", 10)])
def test_resumed_training_equals_straight_training_bitwise(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, arm: str, cut: int
) -> None:
    """20 steps = 7 or 10 + signal + resume, validations in between; 10 is a validation step, 7 is not."""
    straight = write_cell(tmp_path / "straight", data_folder, arm)
    resumed = write_cell(tmp_path / "resumed", data_folder, arm)
    assert fit(straight) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, cut)
        assert fit(resumed) == INTERRUPTED
    assert not (run_folder(resumed) / "summary.json").exists()
    assert fit(resumed, "--ckpt_path", "last") == 0

    expected, actual = weights(run_folder(straight)), weights(run_folder(resumed))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    first, second = summary(run_folder(straight)), summary(run_folder(resumed))
    assert second["restarts"] == 1
    assert without_timing(first) == without_timing(second)
    assert first["curve"]["val"]["step"] == [5, 10, 15, 20]


def test_accumulated_steps_resume_bitwise(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = write_cell(tmp_path / "straight", data_folder, data__batch_size=2)
    resumed = write_cell(tmp_path / "resumed", data_folder, data__batch_size=2)
    assert fit(straight) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        assert fit(resumed) == INTERRUPTED
    assert fit(resumed, "--ckpt_path", "last") == 0
    expected, actual = weights(run_folder(straight)), weights(run_folder(resumed))
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    assert without_timing(summary(run_folder(straight))) == without_timing(summary(run_folder(resumed)))


def test_a_finished_run_leaves_everything_a_reader_needs(tmp_path: Path, data_folder: Path) -> None:
    experiment = write_cell(tmp_path, data_folder)
    assert fit(experiment) == 0
    folder = run_folder(experiment)
    content = validate(summary(folder))
    assert (content["cell"], content["arm"], content["size"], content["seed"]) == (
        "micro_dar_full",
        "dar_full",
        "micro",
        0,
    )
    assert content["budget"]["steps"] == STEPS
    assert content["tokens_seen"] == content["budget"]["tokens"]
    assert content["val_loss_best"] <= content["val_loss_final"] < 5.5
    assert content["parameters"]["pathway"] == sum(
        value.numel() for name, value in weights(folder).items() if ".pathway." in name
    )
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second",
        "val/loss", "val/perplexity", "val/bits_per_byte",
        "pathway/entropy/layer_00", "pathway/largest_weight/layer_01", "pathway/alpha/layer_00",
        "pathway/beta/layer_00", "pathway/rho/layer_00",
    } <= tags  # fmt: skip
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    assert len(events.Scalars("val/loss")) == 4
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def test_the_saved_config_reloads_to_the_same_run(tmp_path: Path, data_folder: Path) -> None:
    experiment = write_cell(tmp_path, data_folder)
    assert fit(experiment, "--model.init_args.pathway.rho_logit", "1.5", "--seed_everything", "3") == 0
    saved = run_folder(experiment, seed=3) / "config.yaml"
    again = tmp_path / "again"
    assert darlit(["fit", "--config", str(saved), "--runs_dir", str(again)]) == 0
    other = again / "micro_dar_full" / "seed_3"
    for name, value in weights(saved.parent).items():
        assert torch.equal(weights(other)[name], value), name
    assert yaml.safe_load(saved.read_text())["model"] == yaml.safe_load((other / "config.yaml").read_text())["model"]


def test_options_win_over_files_wherever_they_stand(tmp_path: Path, data_folder: Path) -> None:
    experiment = write_cell(tmp_path, data_folder)
    options = ["--model.init_args.optimizer.learning_rate=0.001", "--config", str(experiment), "--cell", "other"]
    assert darlit(["fit", *options]) == 0
    saved = yaml.safe_load((tmp_path / "runs" / "other" / "seed_0" / "config.yaml").read_text())
    assert saved["model"]["init_args"]["optimizer"]["learning_rate"] == 0.001


@pytest.fixture
def sizes_and_arms(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a size of its own in configs/, and darlit's arms."""
    cell = yaml.safe_load(write_cell(tmp_path, data_folder, "residual").read_text())
    del cell["model"]["class_path"]
    (tmp_path / "configs" / "size").mkdir(parents=True)
    (tmp_path / "configs" / "size" / "micro.yaml").write_text(yaml.safe_dump(cell))
    shutil.copytree(Path(__file__).parents[1] / "configs" / "arm", tmp_path / "configs" / "arm")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_cell_by_its_name_is_the_cell_by_its_files(sizes_and_arms: Path) -> None:
    named = ["--cell", "micro_dar_block", "--model.backbone.num_layers=3"]
    files = ["--config", "configs/size/micro.yaml", "--config", "configs/arm/dar_block.yaml"]
    assert darlit(["fit", *named, "--runs_dir=by_name"]) == 0
    assert darlit(["fit", *files, "--model.backbone.num_layers=3", "--runs_dir=by_files"]) == 0
    by_name, by_files = (Path(runs) / "micro_dar_block" / "seed_0" for runs in ("by_name", "by_files"))
    for folder in (by_name, by_files):
        saved = yaml.safe_load((folder / "config.yaml").read_text())["model"]
        assert saved["class_path"] == "darlit.modules.arms.DualAttentionResidualLM"
        assert saved["init_args"]["pathway"]["block_size"] == summary(folder)["pathway"]["block_size"] == 2
        assert (summary(folder)["size"], summary(folder)["arm"]) == ("micro", "dar_block")
    for name, value in weights(by_name).items():
        assert torch.equal(weights(by_files)[name], value), name


def test_a_grid_of_variations_trains_what_each_says(sizes_and_arms: Path) -> None:
    grid = Path("pick.yaml")
    vary = {"default": {}, "layer": {"pathway.beta_pattern": "layer"}, "lr_3": {"optimizer.pathway_lr_multiplier": 3.0}}
    group = {"size": "micro", "arms": ["dar_full"], "seeds": [1], "set": {"data.val_sequences": 8}, "vary": vary}
    grid.write_text(yaml.safe_dump({"groups": {"DAR": {**group, "budget": {"tokens": 1280}}}}, sort_keys=False))
    assert darlit(["grid", "check", str(grid)]) == 0
    assert darlit(["grid", "run", str(grid), "--only", "*-layer,micro_dar_full-lr_3", "--runs_dir=runs"]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["micro_dar_full-layer", "micro_dar_full-lr_3"]
    layer, faster = (summary(Path(f"runs/micro_dar_full-{name}/seed_1")) for name in ("layer", "lr_3"))
    assert (layer["pathway"]["beta_pattern"], layer["optimizer"]["pathway_lr_multiplier"]) == ("layer", 1.0)
    assert (faster["pathway"]["beta_pattern"], faster["optimizer"]["pathway_lr_multiplier"]) == ("branch", 3.0)
    assert layer["budget"]["tokens"] == faster["budget"]["tokens"] == 1280
    assert layer["arm"] == "dar_full-layer"


def test_a_cell_that_is_not_in_the_catalog_is_one_line(
    sizes_and_arms: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert darlit(["fit", "--cell", "micro_dar_ful"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("darlit: error: no cell 'micro_dar_ful': ")
    assert "did you mean micro_dar_full?" in error
    assert error.count("\n") == 1
    assert darlit(["fit", "--config", "configs/arm/dar_block.yaml"]) == 2
    assert "pathway.block_size=auto is worked out from backbone.num_layers" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_validate_test_and_predict_use_a_checkpoint(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write_cell(tmp_path, data_folder)
    assert fit(experiment) == 0
    config = str(run_folder(experiment) / "config.yaml")
    before = Path(config).read_bytes()
    capsys.readouterr()
    assert darlit(["validate", "--config", config, "--ckpt_path", "last"]) == 0
    assert f"{summary(run_folder(experiment))['val_loss_final']:.9f}"[:6] in capsys.readouterr().out
    assert darlit(["test", "--config", config, "--ckpt_path", "best"]) == 0
    assert darlit(["predict", "--config", config, "--ckpt_path", "best"]) == 0
    losses = torch.load(run_folder(experiment) / "predictions.pt", weights_only=True)
    assert losses.shape == (16, 32)
    assert losses.mean().item() == pytest.approx(summary(run_folder(experiment))["val_loss_best"], rel=1e-5)
    assert Path(config).read_bytes() == before


def test_an_earlier_run_is_never_lost(tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = write_cell(tmp_path, data_folder)
    assert fit(experiment) == 0
    made = (run_folder(experiment) / "summary.json").stat().st_mtime_ns
    assert darlit(["fit", "--config", str(experiment)]) == 2
    assert "--ckpt_path last" in capsys.readouterr().err
    assert darlit(["fit", "--config", str(experiment), "--ckpt_path", "last"]) == 0
    assert "done already" in capsys.readouterr().out
    assert (run_folder(experiment) / "summary.json").stat().st_mtime_ns == made
    assert darlit(["fit", "--config", str(experiment), "--overwrite", "true"]) == 0
    assert (run_folder(experiment) / "summary.json").stat().st_mtime_ns > made


def test_a_run_killed_before_its_first_checkpoint_logs_nothing_twice(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = write_cell(tmp_path, data_folder)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        assert fit(experiment) == INTERRUPTED
    shutil.rmtree(run_folder(experiment) / "checkpoints")
    assert fit(experiment, "--ckpt_path", "last") == 0
    events = EventAccumulator(str(run_folder(experiment)))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    assert len(events.Scalars("val/loss")) == 4


def test_last_in_an_empty_folder_starts_from_the_beginning(tmp_path: Path, data_folder: Path) -> None:
    experiment = write_cell(tmp_path, data_folder)
    assert fit(experiment, "--ckpt_path", "last") == 0
    assert summary(run_folder(experiment))["restarts"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trainer.max_steps", "10"], ["trainer.max_steps", "budget.tokens"]),
        (["--trainer.accumulate_grad_batches=2"], ["trainer.accumulate_grad_batches", "budget.batch_tokens"]),
        (["--model.init_args.backbone.sequence_length=64"], ["backbone.sequence_length", "data.sequence_length"]),
        (["--model.backbone.sequence_length", "64"], ["backbone.sequence_length", "data.sequence_length"]),
        (["--data.seed", "1"], ["data.seed", "seed_everything"]),
        (["--model.init_args.pathway.block_size", "3"], ["block_size=3", "1 to 2"]),
        (["--model.init_args.backbone.num_heads", "3"], ["backbone.num_heads=3", "backbone.width=32"]),
        (["--model.init_args.backbone.vocab_size", "200"], ["backbone.vocab_size=200", "257"]),
        (["--data.folder", "/nowhere/at/all"], ["/nowhere/at/all", "prepare"]),
        (["--data.sequence_length", "500000"], ["500000"]),
        (["--data.batch_size", "7"], ["budget.batch_tokens=256", "data.batch_size 7"]),
        (["--budget.tokens", "3"], ["budget.tokens=3", "256"]),
        (["--ckpt_path", "nowhere.ckpt"], ["nowhere.ckpt", "does not exist"]),
        (["--data.sequence_length", "99999999"], ["99999999", "lower sequence_length"]),
        (["--trainer.max_epohs", "10"], ["no option --trainer.max_epohs", "did you mean --trainer.max_epochs?"]),
        (["--modle.backbone.width", "8"], ["no option --modle.backbone.width", "did you mean --model"]),
        (["--model.init_args.pathway.rout", "dar"], ["'rout'", "did you mean route?"]),
        (["--model.init_args.pathway.route", "sideways"], ["route='sideways'", "self_kv"]),
        (["--model.init_args.pathway", "null"], ["pathway is null", "leave it out"]),
        (["--model", "ResidualML"], ["'ResidualML'", "did you mean ResidualLM?"]),
        (["--budget.tokens", "many"], ["budget.tokens='many'", "a whole number"]),
        (["--data", "{batch_size: 8, batch_size: 4}"], ["--data: line 1: key 'batch_size' is given twice"]),
        (["--data", "nowhere.yaml"], ["--data 'nowhere.yaml' is neither a file nor a mapping"]),
        (["--budget.tokens"], ["--budget.tokens needs a value"]),
        (["--pictures.every_n_validations", "x"], ["pictures.every_n_validations=x", "whole number"]),
        (["--trainer.max_epochs", "x"], ["trainer.max_epochs=x", "whole number"]),
        (["--trainer.callbacks", "NoSuch"], ["trainer.callbacks=NoSuch"]),
        (["--trainer.accelerator", "gpuu"], ["'gpuu'", "cpu"]),
        (["--trainer.strategy", "ddpx"], ["'ddpx'"]),
        (["stray"], ["unrecognized arguments: stray"]),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    experiment = write_cell(tmp_path, data_folder)
    assert darlit(["fit", "--config", str(experiment), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert not [line for line in lines if "usage:" in line or "Traceback" in line]
    errors = [line for line in lines if line.startswith("darlit: error:")]
    assert len(errors) == 1
    for word in words:
        assert word in errors[0]
    assert not (run_folder(experiment) / "checkpoints").exists()
    assert not (run_folder(experiment) / "summary.json").exists()


def test_a_linked_value_in_a_file_is_refused(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write_cell(tmp_path, data_folder, trainer__max_steps=7)
    assert darlit(["fit", "--config", str(experiment)]) == 2
    assert "trainer.max_steps cannot be set by hand" in capsys.readouterr().err


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("open('executed', 'w')",))


def test_checkpoints_that_do_not_fit_or_run_code_are_refused(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dar, block = (write_cell(tmp_path, data_folder, arm) for arm in ("dar_full", "dar_block"))
    assert fit(dar) == 0
    good = run_folder(dar) / "checkpoints" / "last.ckpt"

    def refused(path: Path) -> str:
        capsys.readouterr()
        assert darlit(["validate", "--config", str(block), "--ckpt_path", str(path)]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("darlit: error:")]
        assert str(path) in line
        return line

    assert "pathway.block_size is 1 there and 2 here" in refused(good)
    truncated = Path(shutil.copy(good, tmp_path / "truncated.ckpt"))
    truncated.write_bytes(good.read_bytes()[:1000])
    assert "refused" in refused(truncated)
    torch.save({"state_dict": Payload()}, tmp_path / "code.ckpt")
    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps(Payload()))
    for name in ("code.ckpt", "pickle.ckpt"):
        assert "refused" in refused(tmp_path / name)
    assert not (tmp_path / "executed").exists()
    assert "not a darlit checkpoint" in (
        torch.save({"a": 1}, tmp_path / "other.ckpt") or refused(tmp_path / "other.ckpt")
    )


def test_runs_from_one_folder_do_not_touch_each_other(tmp_path: Path, data_folder: Path) -> None:
    dar, residual = (write_cell(tmp_path, data_folder, arm) for arm in ("dar_full", "residual"))
    assert fit(dar) == fit(residual) == 0
    assert fit(dar, "--seed_everything", "1") == 0
    names = {"config.yaml", "summary.json", "checkpoints"}
    for folder in (run_folder(dar), run_folder(dar, 1), run_folder(residual)):
        assert names <= {path.name for path in folder.iterdir()}


def test_a_resumed_run_keeps_its_budget_and_schedule(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = write_cell(tmp_path, data_folder)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert fit(experiment) == INTERRUPTED
    for option, value, named in (
        ("--budget.tokens", 40 * 256, "budget.tokens=5120, now it is 10240"),
        ("--budget.batch_tokens", 512, "budget.batch_tokens=256, now it is 512"),
        ("--model.init_args.optimizer.schedule", "warmup_stable_decay", "optimizer.schedule='cosine', now"),
        ("--model.init_args.optimizer.learning_rate", 1e-3, "optimizer.learning_rate=0.003, now it is 0.001"),
    ):
        with pytest.raises(DarlitError, match=re.escape(named)):
            fit(experiment, "--ckpt_path", "last", option, str(value))
    # In another cell, from the checkpoint given by its path, it is a new plan, which the user is told about.
    last = run_folder(experiment) / "checkpoints" / "last.ckpt"
    with pytest.raises(DarlitError, match="budget.tokens=5120, now it is 10240"):
        fit(experiment, "--ckpt_path", str(last), "--budget.tokens", str(40 * 256))
    with pytest.warns(UserWarning, match="planned for 20 steps .* now 40"):
        assert fit(experiment, "--ckpt_path", str(last), "--budget.tokens", str(40 * 256), "--cell", "longer") == 0
    longer = summary(experiment.parent / "runs" / "longer" / "seed_0")
    assert longer["identity"]["continued_from"].startswith("step 5 of ")


def test_last_is_the_last_state_also_when_it_is_not_the_best(tmp_path: Path, data_folder: Path) -> None:
    rising = {"learning_rate": 3.0, "warmup_fraction": 1.0}  # until it destroys what was learned
    experiment = write_cell(tmp_path, data_folder, model__init_args__optimizer=rising)
    assert fit(experiment) == 0
    losses = summary(run_folder(experiment))["curve"]["val"]["loss"]
    assert losses[-1] > min(losses)
    steps = {
        name: torch.load(run_folder(experiment) / "checkpoints" / f"{name}.ckpt", weights_only=True)["global_step"]
        for name in ("best", "last")
    }
    assert steps["last"] == STEPS
    assert steps["best"] < STEPS


def test_a_trainer_that_this_machine_cannot_have_is_one_line(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning.pytorch.accelerators.CUDAAccelerator.is_available", lambda: False)
    cell = write_cell(tmp_path, data_folder, trainer__accelerator="gpu")
    assert darlit(["fit", "--config", str(cell)]) == 2
    error = capsys.readouterr().err.strip()
    assert "--trainer.accelerator cpu" in error.splitlines()[-1]
    assert "Traceback" not in error


def test_tokenizer_and_vocabulary_come_from_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block of docs/data.md: prepare with BPE, then an experiment that was made for bytes, on that folder."""
    sources = tmp_path / "corpus"
    sources.mkdir()
    for number in range(60):
        (sources / f"{number:02}.txt").write_text(f"def function_{number}(x):\n    return x * {number}\n" * 20)
    data = tmp_path / "mine"
    assert darlit(["prepare", str(sources), "--out", str(data), "--tokenizer", "bpe", "--vocab-size", "300"]) == 0
    experiment = Path(__file__).parent.parent / "experiments" / "tiny_dar_full.yaml"
    options = ["--data.folder", str(data), "--data.sequence_length=16", "--data.batch_size=4", "--data.val_sequences=4"]
    options += [
        "--budget",
        "{tokens: 128, batch_tokens: 64, validation_interval: 2}",
        "--runs_dir",
        str(tmp_path / "runs"),
    ]
    options += ["--memory_estimate.enabled=false"]
    arguments = ["fit", "--config", str(experiment), *options]
    assert darlit(arguments) == 0
    run = tmp_path / "runs" / "tiny_dar_full" / "seed_0"
    vocabulary = json.loads((data / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    assert 257 < vocabulary <= 300
    assert summary(run)["data"]["vocab_size"] == summary(run)["backbone"]["vocab_size"] == vocabulary
    assert summary(run)["data"]["tokenizer"] == "bpe"
    assert (
        yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["backbone"]["vocab_size"] == vocabulary
    )
    assert darlit(["validate", "--config", str(run / "config.yaml"), "--ckpt_path", "last"]) == 0
    capsys.readouterr()

    for option, words in (
        ("--model.init_args.backbone.vocab_size=257", ["backbone.vocab_size=257", f"to at least {vocabulary}"]),
        ("--data.tokenizer=bytes", ["prepared with tokenizer 'bpe', not 'bytes'"]),
    ):
        assert darlit([*arguments, "--seed_everything=1", option]) == 2
        [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("darlit: error:")]
        assert all(word in error for word in words), error
    larger = ["--seed_everything=2", "--model.init_args.backbone.vocab_size=320"]
    assert darlit([*arguments, *larger]) == 0
    assert summary(run.with_name("seed_2"))["backbone"]["vocab_size"] == 320


def test_a_plan_counts_the_vocabulary_of_the_data(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Left open it is that of the folder, of the default corpus in bytes, and of the default corpus in BPE."""
    counts = []
    for data in ({}, {"folder": str(data_folder)}, {"folder": None, "tokenizer": "bpe"}):
        experiment = write_cell(tmp_path, data_folder, data__folder=None)
        config = yaml.safe_load(experiment.read_text())
        del config["model"]["init_args"]["backbone"]["vocab_size"]
        config["data"].update(data)
        experiment.write_text(yaml.safe_dump(config))
        assert darlit(["plan", str(experiment), "--quick", "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["experiments"][0]["parameters"]["total"])
    assert counts[0] == counts[1]
    assert counts[2] - counts[0] == (4096 - 257) * 32
