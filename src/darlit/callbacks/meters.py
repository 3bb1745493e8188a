"""The meters of a fit, which all callbacks read: steps, tokens, mean losses, step times."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from darlit.callbacks.step_times import CLOCKS, Clock, StepTime, StepTimes
from darlit.errors import DarlitError
from darlit.modules import Budget

MEANS = {
    "cross_entropy": "train/loss",
    "load_balancing": "train/load_balancing_loss",
    "router_z": "train/router_z_loss",
}
"""Outputs of a training step, and the scalars that their means over a step are logged as."""


class Meters(pl.Callback):
    """Counts and times optimiser steps. It must come before all callbacks that read it.

    A step is complete when the trainer has counted it; no other callback works that out by itself. Per complete step
    it logs the mean losses over all micro-batches and ranks, ``train/tokens_per_second``, ``train/tokens`` (all
    training tokens so far, for a tokens axis) and ``epoch`` (passes over the corpus so far, with a fraction), under the
    number of the step, counted from 1.

    Args:
        clock: what steps are timed with: ``wall`` time, or the CPU time of the ``process``, which means something for
            one thread only.
    """

    def __init__(self, clock: Clock = "wall") -> None:
        self.times = StepTimes(clock)
        self.step = 0
        """Complete optimiser steps, over all restarts."""
        self.tokens = 0
        """Training targets so far, over all ranks and restarts."""
        self.step_complete = False
        """Whether the micro-batch that was just trained on completed a step."""
        self.losses: dict[str, Tensor] = {}
        """Means over the micro-batches and ranks of the last complete step, by output of the training step."""
        self.validation_seconds = 0.0
        """Wall time of the last validation, with its checkpoints."""
        self._micro_batches = 0
        self._step_tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._mark: tuple[float, float] | None = None  # clock and wall time at the end of the last step
        self._waited = 0.0
        self._paused = 0.0

    def seconds_left(self, budget: Budget) -> float | None:
        """Wall time until the budget is spent, with its remaining validations; None before the first timed step."""
        if self.step >= budget.steps:
            return 0.0
        training = self.times.seconds_left((budget.steps - self.step) * budget.batch_tokens)
        validations = -(-budget.steps // budget.validation_interval) - self.step // budget.validation_interval
        return None if training is None else training + validations * self.validation_seconds

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise DarlitError where the CPU time of this process is not the time of a step."""
        if self.times.clock == "wall":
            return
        threads, device, processes = torch.get_num_threads(), pl_module.device.type, trainer.world_size
        if (threads, device, processes) != (1, "cpu", 1):
            raise DarlitError(
                f"throughput.clock=process counts the CPU time of one process with one thread; here are {processes} on "
                f"{device} with {threads}: set OMP_NUM_THREADS=1 (darlit grid run: --threads 1) and one CPU device, "
                "or throughput.clock=wall"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step
        self._mark, self._waited = None, _seconds_waited(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, _: int) -> None:
        if self._mark is None:  # the first batch of all, or after a validation: its step began when it was asked for
            waited = _seconds_waited(trainer) - self._waited
            clock, wall = self._now()
            self._mark = clock - (waited if self.times.clock == "wall" else 0.0), wall - waited
            if self._paused:
                self.validation_seconds, self._paused = self._mark[1] - self._paused, 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self._micro_batches += 1
        self._step_tokens += batch[:, 1:].numel() * trainer.world_size
        for name in MEANS:
            if name in outputs:
                self._sums[name] = self._sums.get(name, 0) + outputs[name].detach()
        self.step_complete = trainer.global_step > self.step
        if self.step_complete:
            self._complete(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._mark, self._waited, self._paused = None, _seconds_waited(trainer), time.perf_counter()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            pl_module.log_dict(self._numbering(trainer), batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "times": self.times.state_dict(), "validation_seconds": self.validation_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting. Raises DarlitError where the run was timed by another clock until now."""
        self.times.load_state_dict(state_dict["times"])
        self.tokens, self.validation_seconds = state_dict["tokens"], state_dict["validation_seconds"]

    def _complete(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if self._micro_batches != trainer.accumulate_grad_batches:
            raise DarlitError(
                f"step {trainer.global_step} had {self._micro_batches} micro-batches instead of "
                f"{trainer.accumulate_grad_batches}: the trainer ended an epoch within a step; leave out what shortens "
                "its epochs"
            )
        self.step = trainer.global_step
        self.tokens += self._step_tokens
        self._time(trainer)
        self.losses = self._reduced(trainer)
        self._micro_batches, self._step_tokens, self._sums = 0, 0, {}
        if 0 < trainer.max_steps <= self.step:
            trainer.should_stop = True  # has the last step validated, also where the interval does not divide the steps
        pl_module.log_dict(
            {
                **{MEANS[name]: loss for name, loss in self.losses.items()},
                "train/tokens_per_second": self.times.recent_tokens_per_second,
                "train/tokens": float(self.tokens),
                **self._numbering(trainer),
            },
            batch_size=1,
        )

    def _time(self, trainer: pl.Trainer) -> None:
        now, waited = self._now(), _seconds_waited(trainer)
        if self._mark is not None:
            clock, wall = (after - before for after, before in zip(now, self._mark, strict=True))
            self.times.add(StepTime(clock, wall, waited - self._waited, self._step_tokens))
        self._mark, self._waited = now, waited

    def _reduced(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        if not self._sums:
            return {}
        means = torch.stack(list(self._sums.values())) / self._micro_batches
        reduced = trainer.strategy.reduce(means, reduce_op="mean")
        assert isinstance(reduced, Tensor)
        return dict(zip(self._sums, reduced, strict=True))

    def _numbering(self, trainer: Any) -> dict[str, float]:
        """Lightning takes a metric named step as the number that it logs under."""
        passes = getattr(trainer.datamodule, "passes", None)
        return {"step": float(self.step), **({} if passes is None else {"epoch": passes(self.tokens)})}

    def _now(self) -> tuple[float, float]:
        return CLOCKS[self.times.clock](), time.perf_counter()


def _seconds_waited(trainer: pl.Trainer) -> float:
    return float(getattr(trainer.train_dataloader, "seconds_waited", 0.0))
