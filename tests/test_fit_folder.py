"""What ``darlit fit`` does with its folder: one writer, everything in it, and right wherever it is moved."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from cells import INTERRUPTED, STEPS, fit, interrupt_after, run_folder, summary, write_cell
from darlit import run
from darlit.__main__ import main
from darlit.run import RunFolder, hold

RISING = {"learning_rate": 3.0, "warmup_fraction": 1.0}  # until it destroys what was learned


class LoggerOfTheCurrentFolder(CSVLogger):
    """Writes into the current folder unless it is told where, as WandbLogger does."""

    def __init__(self, save_dir: str = ".") -> None:
        super().__init__(save_dir)


@pytest.fixture
def experiment(tmp_path: Path, data_folder: Path) -> Path:
    return write_cell(tmp_path, data_folder, "residual", budget__tokens=5 * 256)


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_best_checkpoint_is_the_lowest_point_of_the_curve_wherever_the_folder_lies(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = write_cell(tmp_path, data_folder, model__init_args__optimizer=RISING)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 10)
        assert fit(experiment) == INTERRUPTED
    moved = tmp_path / "moved" / experiment.stem / "seed_0"
    moved.parent.mkdir(parents=True)
    shutil.move(run_folder(experiment), moved)
    assert fit(experiment, "--ckpt_path", "last", "--runs_dir", str(tmp_path / "moved")) == 0
    curve = summary(moved)["curve"]["val"]
    lowest = min(range(4), key=curve["loss"].__getitem__)
    assert curve["step"][lowest] < 10 < curve["step"][-1], "the best one was saved before the move"
    best = torch.load(moved / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["global_step"] == curve["step"][lowest]
    assert sorted(path.name for path in (moved / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert not run_folder(experiment).exists()


def test_a_run_that_continues_another_one_has_a_best_checkpoint_of_its_own(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = write_cell(tmp_path, data_folder, model__init_args__optimizer=RISING)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 10)
        assert fit(experiment) == INTERRUPTED
    last = run_folder(experiment) / "checkpoints" / "last.ckpt"
    assert fit(experiment, "--ckpt_path", str(last), "--cell", "other") == 0
    other = RunFolder.of(tmp_path / "runs", "other", 0)
    assert torch.load(other.checkpoint("best"), weights_only=True)["global_step"] > 10


def test_a_second_fit_ends_at_once_and_touches_nothing(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(experiment) == 0
    with hold(RunFolder(run_folder(experiment))):
        before = _content(run_folder(experiment))
        for options in ([], ["--ckpt_path=last"], ["--overwrite=true"], ["--overwrite=true", "--budget.tokens=2560"]):
            capsys.readouterr()
            assert main(["fit", "--config", str(experiment), *options]) == run.LOCKED
            (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("darlit: error:")]
            assert f"is written by pid {os.getpid()} on {socket.gethostname()}; wait for it, stop it" in line
        assert _content(run_folder(experiment)) == before
    assert main(["fit", "--config", str(experiment), "--overwrite=true"]) == 0, "the lock is free again"
    assert not (run_folder(experiment) / "run.lock").exists()


def test_bad_input_leaves_the_earlier_run_in_place(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(experiment) == 0
    before = _content(run_folder(experiment))
    last = str(run_folder(experiment) / "checkpoints" / "last.ckpt")
    for options, named in (
        (["--data.folder", str(tmp_path / "none")], "does not exist"),
        (["--data.batch_size", "7"], "not a multiple"),
        (["--ckpt_path", last], "--overwrite true deletes what --ckpt_path asks for"),
        (["--ckpt_path", str(tmp_path / "none.ckpt")], "does not exist"),
    ):
        assert main(["fit", "--config", str(experiment), "--overwrite=true", *options]) == 2
        assert named in capsys.readouterr().err
        assert _content(run_folder(experiment)) == before


def test_a_folder_with_a_run_takes_no_checkpoint_of_another_one(
    experiment: Path, dar_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(experiment) == 0
    before = _content(run_folder(experiment))
    assert main(["fit", "--config", str(experiment), "--ckpt_path", str(dar_run / "checkpoints" / "last.ckpt")]) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert _content(run_folder(experiment)) == before


def test_the_saved_config_never_deletes_the_run_that_saved_it(experiment: Path) -> None:
    assert main(["fit", "--config", str(experiment), "--overwrite=true", "--ckpt_path=last"]) == 0
    saved = run_folder(experiment) / "config.yaml"
    content = yaml.safe_load(saved.read_text())
    assert (content["overwrite"], content["ckpt_path"]) == (False, None)
    before = (run_folder(experiment) / "summary.json").read_bytes()
    assert main(["fit", "--config", str(saved), "--ckpt_path=last"]) == 0
    assert (run_folder(experiment) / "summary.json").read_bytes() == before


_CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "LOGS"}}
_CURRENT = {"class_path": f"{__name__}.LoggerOfTheCurrentFolder"}


@pytest.mark.parametrize("logger", [_CSV, _CURRENT, [_CSV, _CURRENT], False], ids=["csv", "current", "list", "none"])
def test_the_config_lies_in_the_run_folder_whatever_logs(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, logger: Any
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "config.yaml").write_text("mine\n")
    monkeypatch.chdir(work)
    text = yaml.safe_dump(logger).replace("LOGS", str(tmp_path / "logs"))
    changes = {"budget__tokens": 5 * 256, "trainer__logger": yaml.safe_load(text)}
    experiment = write_cell(tmp_path, data_folder, "residual", **changes)
    assert fit(experiment) == 0
    saved = run_folder(experiment) / "config.yaml"
    assert saved.is_file()
    assert _content(work) == {work / "config.yaml": b"mine\n"}
    assert main(["validate", "--config", str(saved), "--ckpt_path=last"]) == 0
    assert main(["analyze", "depth", str(run_folder(experiment)), f"--out={tmp_path / 'out'}", "--tokens=64"]) == 2, (
        "a residual run has no depth weights; the run itself is read"
    )
    assert _content(work) == {work / "config.yaml": b"mine\n"}


def test_a_summary_says_what_the_run_was_and_what_it_ran_on(dar_run: Path) -> None:
    done, recorded = summary(dar_run), RunFolder(dar_run).recorded()
    checkpoint = torch.load(dar_run / "checkpoints" / "last.ckpt", weights_only=True)
    assert recorded is not None
    assert done["identity"] == recorded.identity == checkpoint["identity"]
    assert done["devices"] == recorded.devices == 1
    assert (done["schema_version"], done["identity"]["data.val_sequences"]) == (2, 16)
    assert done["identity"]["trainer.gradient_clip_algorithm"] == "norm"


def test_a_resumed_run_names_every_revision_that_trained_it(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = write_cell(tmp_path, data_folder, "residual")
    monkeypatch.setattr("darlit.callbacks.run_record.git_revision", lambda: "a")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        assert fit(experiment) == INTERRUPTED
    monkeypatch.setattr("darlit.callbacks.run_record.git_revision", lambda: "b-dirty")
    assert fit(experiment, "--ckpt_path", "last") == 0
    assert summary(run_folder(experiment))["git_revision"] == "a, b-dirty"
    assert summary(run_folder(experiment))["curve"]["val"]["step"][-1] == STEPS
