"""Requeueing touches this task only; signals end in a checkpoint (tests/test_cli.py shows that it resumes bitwise)."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from cells import INTERRUPTED, fit, run_folder, weights, write_cell
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
