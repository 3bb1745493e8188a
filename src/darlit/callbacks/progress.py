"""One progress bar over the whole budget: step, loss, tokens/s, time left. Plain lines where there is no terminal."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks.progress import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from darlit.callbacks.meters import Meters
from darlit.modules import Budget


class BudgetProgress(ProgressBar):
    """Shows a fit by optimiser steps.

    Args:
        meters, budget: where speed and time left come from.
        seconds_between_lines: how often a line is printed when the output is not a terminal.
    """

    loader_share_shown = 0.05
    """The loader's share of the time is shown from here on."""

    def __init__(self, meters: Meters, budget: Budget, seconds_between_lines: float = 20.0) -> None:
        super().__init__()
        self.meters = meters
        self.budget = budget
        self.seconds_between_lines = seconds_between_lines
        self.console = Console()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._val_loss = float("nan")
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        return self._enabled

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._enabled or not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
        )
        self._task = self._progress.add_task("fit", total=trainer.max_steps, completed=trainer.global_step, status="")
        self._progress.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.meters.step_complete:
            return
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=trainer.global_step, status=self._status(trainer))
        elif self._enabled and time.monotonic() - self._last_line > self.seconds_between_lines:
            self._print_line(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._val_loss = float(trainer.callback_metrics.get("val/loss", self._val_loss))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        if self._enabled:
            self._print_line(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.console.print(*args)

    def _print_line(self, trainer: pl.Trainer) -> None:
        self._last_line = time.monotonic()
        print(f"step {trainer.global_step}/{trainer.max_steps}  {self._status(trainer)}", flush=True)

    def _status(self, trainer: Any) -> str:
        times, left = self.meters.times, self.meters.seconds_left(self.budget)
        loss = float(trainer.callback_metrics.get("train/loss", float("nan")))
        val = "" if math.isnan(self._val_loss) else f"  val {self._val_loss:.3f}"
        share = times.loader_share if times.steps else 0.0
        waiting = f" (loader {share:.0%} of the time)" if share >= self.loader_share_shown else ""
        remaining = f"  {timedelta(seconds=round(left))} left" if left else ""
        return f"loss {loss:.3f}{val}  {times.recent_tokens_per_second:,.0f} tokens/s{waiting}{remaining}"

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
