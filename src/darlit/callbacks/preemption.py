"""SIGTERM, SIGUSR1 and Ctrl-C end a run in a checkpoint at a step boundary; under Slurm, SIGUSR1 requeues this task
only.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from darlit.callbacks.meters import Meters
from darlit.errors import DarlitError
from darlit.run import INTERRUPTED, RunFolder


class Preemption(Checkpoint):
    """Saves ``checkpoints/last.ckpt`` once the current step is complete and logged, then exits with status 75.

    A second Ctrl-C does not wait for the step and saves nothing. A `Checkpoint` by type: Lightning then calls it after
    those that it follows in the list, whose ``best.ckpt`` must not miss the validation that it exits from.
    """

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, meters: Meters) -> None:
        self.meters = meters
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for number in self.signals:
            self._previous[number] = signal.signal(number, self._remember)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.meters.step_complete or not self._agreed(trainer):
            return
        loop: Any = trainer.fit_loop.epoch_loop
        if loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            return  # the validation of this step comes first and saves
        # Lightning logs this step and counts this batch as completed only after this hook; both must precede the exit.
        trainer._logger_connector.update_train_step_metrics()
        with _counted(loop):
            self._save_and_exit(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self._agreed(trainer):
            self._save_and_exit(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.received == signal.SIGINT:
                raise KeyboardInterrupt
            # os.write: a handler may interrupt a print, which is not reentrant.
            os.write(2, b"\nCtrl-C: saving at the end of this step; once more stops at once, without saving\n")
        self.received = signal.Signals(number)

    def _agreed(self, trainer: pl.Trainer) -> bool:
        """Whether any rank was signalled; all ranks give the same answer."""
        received = self.received is not None
        return trainer.strategy.reduce_boolean_decision(received, all=False) if trainer.world_size > 1 else received

    def _save_and_exit(self, trainer: pl.Trainer) -> None:
        path = RunFolder(Path(trainer.default_root_dir)).checkpoint("last")
        trainer.save_checkpoint(path)
        name = self.received.name if self.received else "a signal to another rank"
        if trainer.is_global_zero:
            print(
                f"{name}: saved step {trainer.global_step} to {path}; to continue, run the same command with "
                "--ckpt_path last",
                file=sys.stderr,
            )
            if self.received == signal.SIGUSR1 and "SLURM_JOB_ID" in os.environ:
                requeue(subprocess.run)
        raise SystemExit(INTERRUPTED)


class _counted:
    """Within, the loop's state says that the current batch is complete."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(self, *exception: object) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        progress = self.loop.batch_progress
        progress.total.completed += change
        progress.current.completed += change
        self.loop._batches_that_stepped += change


def requeue(run: Callable[..., Any]) -> None:
    """Ask Slurm to requeue this job, and of an array this task only."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
        raise DarlitError(f"SLURM_JOB_ID={job!r} is not a job number; nothing was requeued")
    run(["scontrol", "requeue", job], check=True)
