"""Requeueing touches this task only; signals end in a checkpoint (tests/test_cli.py shows that it resumes bitwise)."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cells import INTERRUPTED, STEPS, fit, run_folder, weights, write_cell
from darlit.callbacks.preemption import Preemption, requeue
from darlit.errors import DarlitError


def requeued(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[list[str]]:
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls: list[list[str]] = []
    requeue(lambda command, check: calls.append(command))
    return calls


def test_a_job_requeues_itself_and_an_array_task_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requeued(monkeypatch, SLURM_JOB_ID="12") == [["scontrol", "requeue", "12"]]
    array = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2"}
    assert requeued(monkeypatch, **array) == [["scontrol", "requeue", "12_2"]]


def test_what_is_no_job_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DarlitError, match="not a job number"):
        requeued(monkeypatch, SLURM_JOB_ID="12; rm -rf x")


def test_a_signal_at_any_moment_leaves_a_checkpoint_that_loads(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 from inside random hooks of random steps, outside Slurm: nothing is requeued, all checkpoints load."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    generator = random.Random(0)
    hooks = ["on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"]
    for number in range(4):
        hook, step = generator.choice(hooks), generator.randrange(1, 18)
        experiment = write_cell(tmp_path / str(number), data_folder)

        def interrupt(self: Preemption, trainer: pl.Trainer, *_: Any, step: int = step) -> None:
            if trainer.global_step == step and self.received is None:
                signal.raise_signal(signal.SIGUSR1)

        with monkeypatch.context() as patch:
            patch.setattr(Preemption, hook, interrupt, raising=False)
            assert fit(experiment) == INTERRUPTED
        assert weights(run_folder(experiment))
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        assert fit(experiment, "--ckpt_path", "last") == 0


def signalled(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals, times: int = 1) -> None:
    """Raise a signal in this process during the given optimiser step of the next fit."""
    original = Preemption.on_train_batch_end

    def raising(self: Preemption, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == step and self.received is None:
            for _ in range(times):
                signal.raise_signal(number)
        original(self, trainer, *arguments)

    monkeypatch.setattr(Preemption, "on_train_batch_end", raising)


def logged(folder: Path, tag: str) -> list[int]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_loses_no_logged_step_and_says_how_to_continue(
    tmp_path: Path,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    """Ctrl-C is SIGINT. Step 7 is no validation: it is saved, logged, and continued from."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    experiment = write_cell(tmp_path, data_folder)
    with monkeypatch.context() as patch:
        signalled(patch, 7, number)
        assert fit(experiment) == INTERRUPTED
    error = capfd.readouterr().err
    assert f"{number.name}: saved step 7 to " in error
    assert "--ckpt_path last" in error.splitlines()[-1]
    assert logged(run_folder(experiment), "train/loss") == list(range(1, 8))
    assert fit(experiment, "--ckpt_path", "last") == 0
    assert logged(run_folder(experiment), "train/loss") == list(range(1, STEPS + 1))
    assert logged(run_folder(experiment), "val/loss") == [5, 10, 15, 20]


def test_a_second_ctrl_c_stops_at_once(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    experiment = write_cell(tmp_path, data_folder)
    with monkeypatch.context() as patch:
        signalled(patch, 7, signal.SIGINT, times=2)
        assert fit(experiment) not in (0, INTERRUPTED)
    assert "once more stops at once" in capfd.readouterr().err
    saved = torch.load(run_folder(experiment) / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 5  # the last validation's
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert fit(experiment, "--ckpt_path", "last") == 0


def test_a_signal_during_a_validation_still_keeps_the_best_weights(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation of step 10 is the best so far; the run ends after it, and best.ckpt must be its weights."""
    experiment = write_cell(tmp_path, data_folder)
    with monkeypatch.context() as patch:
        signalled(patch, 10, signal.SIGTERM)
        assert fit(experiment) == INTERRUPTED
    steps = {
        name: torch.load(run_folder(experiment) / "checkpoints" / f"{name}.ckpt", weights_only=True)["global_step"]
        for name in ("best", "last")
    }
    assert steps == {"best": 10, "last": 10}
