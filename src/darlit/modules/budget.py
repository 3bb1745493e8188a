"""The budget that all arms of a comparison share: tokens, and tokens per optimiser step, on any number of devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from darlit.errors import DarlitError
from darlit.fields import check_fields, check_option

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True)
class Budget:
    """How much a run trains: a number of optimiser steps, each of the same number of micro-batches.

    Args:
        tokens: training tokens in all; the steps are tokens // batch_tokens.
        batch_tokens: tokens of one optimiser step over all devices; gradients are accumulated to reach it.
        validation_interval: optimiser steps between validations (a checkpoint follows each); the last step has one too.
    """

    tokens: int = 1_000_000
    batch_tokens: int = 2048
    validation_interval: int = 50

    def __post_init__(self) -> None:
        check_fields(self, "budget.")
        check_option("budget.batch_tokens", self.batch_tokens, self.batch_tokens >= 1, "at least 1")
        check_option(
            "budget.tokens", self.tokens, self.tokens >= self.batch_tokens, f"at least batch_tokens={self.batch_tokens}"
        )
        check_option(
            "budget.validation_interval", self.validation_interval, self.validation_interval >= 1, "at least 1"
        )

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens

    def apply(self, trainer: pl.Trainer, batch_size: int, sequence_length: int) -> None:
        """Set steps, gradient accumulation and validation interval of ``trainer`` for its number of devices.

        The budget alone decides how long a run is: what else could end a trainer's epoch, in the middle of a step too,
        is rejected.

        Args:
            batch_size: sequences of one device and one forward pass.
            sequence_length: tokens of a sequence.

        Raises:
            DarlitError: batch_tokens is not a multiple of what all devices take at once, or the trainer has another
                limit than the budget.
        """
        _check_no_other_limit(trainer)
        at_once = trainer.world_size * batch_size * sequence_length
        if self.batch_tokens % at_once:
            raise DarlitError(
                f"budget.batch_tokens={self.batch_tokens} is not a multiple of {at_once} (devices {trainer.world_size} "
                f"x data.batch_size {batch_size} x data.sequence_length {sequence_length}); change data.batch_size"
            )
        trainer.accumulate_grad_batches = self.batch_tokens // at_once
        trainer.fit_loop.epoch_loop.max_steps = self.steps
        interval = min(self.validation_interval, self.steps) * trainer.accumulate_grad_batches
        trainer.val_check_interval = interval
        trainer.check_val_every_n_epoch = None
        trainer.limit_train_batches = 1.0  # overfit_batches had set it: the data order repeats these batches itself


def _check_no_other_limit(trainer: Any) -> None:
    from lightning.pytorch.callbacks import Timer

    limits = {
        "fast_dev_run": trainer.fast_dev_run,
        "limit_train_batches": not trainer.overfit_batches
        and repr(trainer.limit_train_batches) != "1.0",  # 1 is one batch
        "max_epochs": trainer.max_epochs != -1,
        "min_epochs": trainer.min_epochs,
        "min_steps": trainer.min_steps,
        "max_time": any(isinstance(callback, Timer) for callback in trainer.callbacks),
    }
    for name, given in limits.items():
        if given:
            raise DarlitError(
                f"trainer.{name} is not allowed: the budget alone says how long a run is; leave it out and set "
                "budget.tokens (to stop early, send SIGTERM: the run saves and can be continued)"
            )
