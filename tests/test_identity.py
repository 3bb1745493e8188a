"""A run is its identity, not its name: every leaf of the configuration counts or is on the table of what may differ."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from cells import INTERRUPTED, fit, interrupt_after, run_folder, write_cell
from darlit import run
from darlit.__main__ import main
from darlit.cli import resolve
from darlit.data.prepare import Options, prepare
from darlit.grid.cells import catalog_cell, read_grid
from darlit.grid.status import read_state
from darlit.grid.unchanged import asked
from darlit.modules.arms import MODULES
from darlit.modules.loading import load
from darlit.run import MAY_DIFFER, RunFolder, difference, field_name, flatten, may_differ
from darlit.settings import LINKED

DATA = {"data.fingerprint": "f", "data.tokenizer": "bytes"}
# Every field that counts, decided one by one. A new leaf of the configuration fails the test below until it is added
# here, or to MAY_DIFFER with its reason.
COUNTS = {
    "": "seed_everything",
    "model": "class_path",
    "budget": "tokens batch_tokens validation_interval",
    "data": "batch_size holdout sequence_length val_sequences",
    "non_finite": "limit on_non_finite",
    "optimizer": (
        "beta1 beta2 decay_fraction final_fraction learning_rate pathway_lr_multiplier schedule warmup_fraction "
        "weight_decay"
    ),
    "backbone": (
        "document_separator experts_per_token ffn_width init_std load_balancing_weight norm_eps "
        "normalize_expert_weights num_experts num_heads num_layers rope_base router_z_weight tie_embeddings vocab_size "
        "width"
    ),
    "trainer": (
        "accumulate_grad_batches barebones check_val_every_n_epoch enable_checkpointing fast_dev_run "
        "gradient_clip_algorithm gradient_clip_val limit_train_batches limit_val_batches max_epochs max_time "
        "min_epochs min_steps num_sanity_val_steps overfit_batches plugins precision reload_dataloaders_every_n_epochs "
        "sync_batchnorm use_distributed_sampler val_check_interval"
    ),
}


def _leaves(class_path: str) -> dict[str, Any]:
    """The resolved configuration of a class by dotted key."""
    return flatten("", resolve({"model": {"class_path": class_path}}))


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in leaves.items():
        *parents, last = key.split(".")
        inner = config
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return config


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}_other"


@pytest.fixture(scope="module")
def arms() -> dict[str, dict[str, Any]]:
    return {name: _leaves(name) for name in MODULES}


def test_every_leaf_is_decided(arms: dict[str, dict[str, Any]]) -> None:
    counts = {f"{group}.{name}".lstrip(".") for group, names in COUNTS.items() for name in names.split()}
    fields = {field_name(key) for leaves in arms.values() for key in leaves}
    shared = {field for field in fields if not field.startswith("pathway")}  # every option of a pathway counts
    undecided = {field for field in shared if not may_differ(field)} - counts
    assert not undecided, "new fields: add them to COUNTS, or to run.MAY_DIFFER and docs/experiments.md"
    assert counts <= shared, "fields that are no more"
    assert not {field for field in counts if may_differ(field)}
    gone = {free for free in MAY_DIFFER if not any(field == free or field.startswith(f"{free}.") for field in shared)}
    assert not gone, "free fields that are no more"


def test_the_parser_has_no_leaf_that_a_configuration_hides(arms: dict[str, dict[str, Any]]) -> None:
    """What the parser takes and the resolved configuration lacks is linked to a field that is there."""
    from darlit.cli import _resolver

    parser = _resolver()._parser("fit")
    known = set(arms["ResidualLM"])
    for action in parser._actions:
        name = action.dest
        group = name in ("config", "print_config", "model") or any(key.startswith(f"{name}.") for key in known)
        if group or name.endswith("help"):
            continue
        assert name in known or name in LINKED, name


def test_changing_a_leaf_changes_the_identity_or_is_on_the_table(arms: dict[str, dict[str, Any]]) -> None:
    for leaves in arms.values():
        before = run.identity_of(_nested(leaves), DATA, devices=1)
        for key, value in leaves.items():
            after = run.identity_of(_nested({**leaves, key: _other(value)}), DATA, devices=1)
            changed, field = difference(before, after), field_name(key)
            if may_differ(field):
                assert changed is None, key
            else:
                assert changed is not None, key
                assert changed.startswith(f"{field}="), key
                assert "more:" not in changed


def test_devices_may_differ_as_long_as_a_step_sees_the_same_sequences(arms: dict[str, dict[str, Any]]) -> None:
    leaves = arms["ResidualLM"]
    eight = run.identity_of(_nested({**leaves, "data.batch_size": 4}), DATA, devices=8)
    assert difference(eight, run.identity_of(_nested({**leaves, "data.batch_size": 32}), DATA, devices=1)) is None
    changed = difference(eight, run.identity_of(_nested({**leaves, "data.batch_size": 4}), DATA, devices=1))
    assert changed == "data.batch_size=32, now it is 4"


def test_two_spellings_of_one_value_are_one_identity(arms: dict[str, dict[str, Any]]) -> None:
    for key, first, second in (
        ("trainer.precision", None, "32-true"),
        ("trainer.precision", "bf16", "bf16-mixed"),
        ("trainer.gradient_clip_algorithm", None, "norm"),
        ("model.class_path", "ResidualLM", "darlit.modules.arms.ResidualLM"),
    ):
        sides = [
            run.identity_of(_nested({**arms["ResidualLM"], key: value}), DATA, devices=1) for value in (first, second)
        ]
        assert difference(*sides) is None, key


# --- resume


@pytest.fixture(scope="module")
def stopped(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment of a run that was stopped after 7 of 20 steps."""
    experiment = write_cell(tmp_path_factory.mktemp("stopped"), data_folder, "dar_block")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 7)
        assert fit(experiment) == INTERRUPTED
    return experiment


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("darlit: error:")]
    return line


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--trainer.precision=bf16-mixed", "trainer.precision='32-true', now it is 'bf16-mixed'"),
        ("--trainer.gradient_clip_val=0.5", "trainer.gradient_clip_val=1.0, now it is 0.5"),
        ("--trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_algorithm='norm', now it is 'value'"),
        ("--data.val_sequences=8", "data.val_sequences=16, now it is 8"),
        ("--trainer.limit_val_batches=0.5", "trainer.limit_val_batches=None, now it is 0.5"),
        ("--non_finite.on_non_finite=skip", "non_finite.on_non_finite='stop', now it is 'skip'"),
        ("--data.batch_size=4", "data.batch_size=8, now it is 4"),
    ],
)
def test_a_resumed_run_keeps_every_field_that_changes_numbers(
    stopped: Path, capsys: pytest.CaptureFixture[str], option: str, named: str
) -> None:
    folder = run_folder(stopped)
    before = _content(folder)
    last = str(folder / "checkpoints" / "last.ckpt")
    for where in ("last", last):
        line = _refused(capsys, "fit", "--config", str(stopped), "--ckpt_path", where, option)
        assert f"{folder} was trained with {named}; a run keeps what it was trained as" in line
    assert _content(folder) == before


def test_a_checkpoint_of_another_run_in_this_folder_is_refused(
    stopped: Path, dar_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of the folder agrees, the checkpoint does not."""
    runs = Path(shutil.copytree(stopped.parent / "runs", tmp_path / "runs"))
    folder = RunFolder.of(runs, stopped.stem, 0)
    shutil.copy(dar_run / "checkpoints" / "last.ckpt", folder.checkpoint("last"))
    line = _refused(capsys, "fit", "--config", str(stopped), "--ckpt_path", "last", "--runs_dir", str(runs))
    assert f"{folder.checkpoint('last')} was trained with budget.tokens=1280, now it is 5120 (and 1 more" in line


def test_a_run_says_that_it_continues_another_one(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = str(run_folder(stopped) / "checkpoints" / "last.ckpt")
    call = ["--config", str(stopped), "--runs_dir", str(tmp_path / "runs"), "--trainer.gradient_clip_val=0.5"]
    with pytest.warns(UserWarning, match="was trained with trainer.gradient_clip_val=1.0, now it is 0.5"):
        assert main(["fit", *call, "--ckpt_path", last]) == 0
    recorded = RunFolder.of(tmp_path / "runs", stopped.stem, 0).recorded()
    assert recorded is not None
    assert recorded.identity["continued_from"].startswith("step 7 of ")
    assert main(["fit", *call, "--ckpt_path", "last"]) == 0
    assert "done already" in capsys.readouterr().out
    grid = _write_grid(tmp_path, yaml.safe_load(stopped.read_text()) | {"trainer": {"gradient_clip_val": 0.5}})
    state = read_state(read_grid(grid).tasks[0], tmp_path / "runs", {})
    assert state.kind == "changed", "a cell asks for a run from the beginning"
    assert "continued_from='step 7 of" in state.detail


@pytest.mark.parametrize("seed", ["true", "false", "-1"])
def test_a_seed_is_a_whole_number(
    tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str], seed: str
) -> None:
    experiment = write_cell(tmp_path, data_folder)
    line = _refused(capsys, "fit", "--config", str(experiment), "--seed_everything", seed)
    assert "seed_everything" in line
    assert not (tmp_path / "runs").exists()


# --- the data


@pytest.fixture
def other_split(tmp_path: Path, data_folder: Path) -> Path:
    """The same documents, split differently."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"x{number} = {number}\n" * 60)
    prepare([str(texts)], tmp_path / "other", Options(val_fraction=0.5))
    return tmp_path / "other"


def test_a_folder_that_was_prepared_again_is_not_the_data_of_the_run(
    tmp_path: Path, dar_run: Path, data_folder: Path, other_split: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(dar_run, tmp_path / "runs" / dar_run.parent.name / "seed_0"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"]["folder"] = str(tmp_path / "data")
    config["runs_dir"] = str(tmp_path / "runs")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    call = ["--config", str(folder / "config.yaml"), "--ckpt_path", "last"]
    shutil.copytree(data_folder, tmp_path / "data")
    assert main(["validate", *call]) == 0, "a copy is the same data"
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(other_split, tmp_path / "data")
    for verb in ("validate", "test", "predict"):
        assert "was trained with data.fingerprint='" in _refused(capsys, verb, *call)
    assert "was trained with data.fingerprint='" in _refused(capsys, "analyze", "cka", str(folder))
    assert "was trained with data.fingerprint='" in _refused(capsys, "fit", *call)
    assert not (folder / "predictions.pt").exists()


def test_the_data_of_a_run_are_restored_from_its_own_record(
    tmp_path: Path, data_folder: Path, other_split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold-out is part of it: the default corpus of the same tokenizer is another one."""
    monkeypatch.setattr(
        "darlit.data.datamodule.default_folder",
        lambda tokenizer, holdout="validation": data_folder if holdout == "screening" else other_split,
    )
    monkeypatch.setattr("darlit.data.prepare.prepare_default", lambda *_, **__: None)
    experiment = write_cell(tmp_path, data_folder, data__folder=None, data__holdout="screening")
    assert fit(experiment) == 0
    saved = load(run_folder(experiment))
    assert saved.manifest().folder == data_folder
    assert saved.manifest().fingerprint == saved.identity["data.fingerprint"]


# --- the grid


def _write_grid(folder: Path, config: dict[str, Any], name: str = "micro_dar_block") -> Path:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    (folder / "grid.yaml").write_text(yaml.safe_dump({"groups": {"micro": {"cells": [name], "seeds": [0]}}}))
    return folder / "grid.yaml"


@pytest.mark.parametrize(
    ("dotted", "value", "named"),
    [
        ("model.init_args.pathway.route", "self_kv", "pathway.route='dar', now it is 'self_kv'"),
        ("model.init_args.optimizer.learning_rate", 1e-3, "optimizer.learning_rate=0.003, now it is 0.001"),
        ("budget.tokens", 2560, "budget.tokens=1280, now it is 2560"),
        ("data.folder", "other", "data.fingerprint='"),
        ("model.class_path", "ResidualLM", "model.class_path='DualAttentionResidualLM', now it is 'ResidualLM'"),
    ],
)
def test_a_finished_run_whose_cell_was_edited_is_not_done(
    tmp_path: Path, dar_run: Path, other_split: Path, capsys: pytest.CaptureFixture[str],
    dotted: str, value: Any, named: str,
) -> None:  # fmt: skip
    runs, out = Path(shutil.copytree(dar_run.parents[1], tmp_path / "runs")), tmp_path / "out"
    config = yaml.safe_load((dar_run.parents[2] / f"{dar_run.parent.name}.yaml").read_text())
    grid = _write_grid(tmp_path, config, dar_run.parent.name)
    assert main(["grid", "run", str(grid), f"--runs_dir={runs}"]) == 0
    assert "1 of 1 runs are done" in capsys.readouterr().out
    assert main(["grid", "collect", str(grid), f"--runs_dir={runs}", f"--out={tmp_path / 'kept'}"]) == 0
    before = _content(tmp_path / "kept") | _content(runs)

    inner = config
    *parents, last = dotted.split(".")
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = str(other_split) if dotted == "data.folder" else value
    cell = _write_grid(tmp_path, config, dar_run.parent.name).parent / f"{dar_run.parent.name}.yaml"
    for arguments in (
        ["grid", "run", str(grid), f"--runs_dir={runs}"],
        ["grid", "run", str(grid), f"--runs_dir={runs}", "--index=0"],
        ["grid", "run", str(grid), f"--runs_dir={tmp_path / 'none'}", f"--kept={tmp_path / 'kept'}"],
        ["grid", "submit", str(grid), f"--runs_dir={runs}", "--dry-run"],
        ["grid", "collect", str(grid), f"--runs_dir={runs}", f"--out={out}"],
        ["grid", "choose", str(grid), f"--runs_dir={runs}"],
        ["grid", "choose", str(grid), f"--runs_dir={tmp_path / 'kept'}"],
        ["results", str(runs), f"--grid={grid}", f"--out={out}", "--figures=none"],
        ["fit", "--config", str(cell), f"--runs_dir={runs}", "--ckpt_path=last"],
    ):
        assert f"was trained with {named}" in _refused(capsys, *arguments), arguments
    state = read_state(read_grid(grid).tasks[0], runs, {})
    assert (state.kind, named in state.detail) == ("changed", True)
    assert _content(tmp_path / "kept") | _content(runs) == before
    assert not out.exists()


def test_an_unfinished_run_whose_cell_was_edited_is_not_continued(
    tmp_path: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by the file nor by an option for all runs."""
    config = yaml.safe_load(stopped.read_text())
    grid = _write_grid(tmp_path, config)
    call = ["grid", "run", str(grid), f"--runs_dir={stopped.parent / 'runs'}"]
    line = _refused(capsys, *call, "--", "--trainer.gradient_clip_val=0.5")
    assert "was trained with trainer.gradient_clip_val=1.0, now it is 0.5 in" in line
    config["budget"]["validation_interval"] = 10
    line = _refused(capsys, *call[:2], str(_write_grid(tmp_path, config)), call[3])
    assert "was trained with budget.validation_interval=5, now it is 10" in line


def test_a_cell_that_fit_does_not_accept_is_not_the_one_that_was_trained(
    tmp_path: Path, dar_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((dar_run.parents[2] / f"{dar_run.parent.name}.yaml").read_text())
    config["budget"]["tokenz"] = 3
    grid = _write_grid(tmp_path, config, dar_run.parent.name)
    assert "tokenz" in _refused(capsys, "grid", "run", str(grid), f"--runs_dir={dar_run.parents[1]}")
    assert "tokenz" in _refused(capsys, "grid", "collect", str(grid), f"--runs_dir={dar_run.parents[1]}")
    state = read_state(read_grid(grid).tasks[0], dar_run.parents[1], {})
    assert state.kind == "changed"
    assert "cannot be compared with" in state.detail


def test_data_that_are_not_here_are_not_compared(tmp_path: Path, dar_run: Path) -> None:
    """Summaries are collected to be read on machines without the corpus."""
    config = yaml.safe_load((dar_run.parents[2] / f"{dar_run.parent.name}.yaml").read_text())
    config["data"]["folder"] = str(tmp_path / "elsewhere")
    task = read_grid(_write_grid(tmp_path, config, dar_run.parent.name)).tasks[0]
    assert read_state(task, dar_run.parents[1], {}).kind == "done"


def test_block_size_auto_is_compared_as_the_number_that_the_options_make_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    cell = catalog_cell("tiny_dar_block")
    assert asked(cell, 0)["pathway.block_size"] == 2
    assert asked(cell, 0, ["--model.backbone.num_layers=24"])["pathway.block_size"] == 3
    assert asked(cell, 0) == asked(read_grid("experiments/grids/tiny.yaml", ["tiny_dar_block"]).cells[0], 0)
