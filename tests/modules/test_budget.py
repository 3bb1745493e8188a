"""The budget: the same tokens a step on any number of devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from darlit.errors import DarlitError
from darlit.modules import Budget


def fake_trainer(world_size: int) -> Any:
    return SimpleNamespace(
        world_size=world_size,
        accumulate_grad_batches=1,
        val_check_interval=1.0,
        check_val_every_n_epoch=1,
        callbacks=[],
        fast_dev_run=False,
        limit_train_batches=1.0,
        overfit_batches=0.0,
        max_epochs=-1,
        min_epochs=None,
        min_steps=None,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(max_steps=-1)),
    )


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 8), (2, 4), (8, 1)])
def test_accumulation_makes_up_for_fewer_devices(world_size: int, accumulate: int) -> None:
    trainer = fake_trainer(world_size)
    Budget(tokens=10_000, batch_tokens=1024, validation_interval=3).apply(trainer, batch_size=4, sequence_length=32)
    assert trainer.accumulate_grad_batches == accumulate
    assert trainer.fit_loop.epoch_loop.max_steps == 9
    assert trainer.val_check_interval == 3 * accumulate
    assert trainer.check_val_every_n_epoch is None


def test_a_batch_that_devices_cannot_share_is_refused() -> None:
    with pytest.raises(DarlitError, match="not a multiple of 384 .*change data.batch_size"):
        Budget(tokens=10_000, batch_tokens=1024).apply(fake_trainer(3), batch_size=4, sequence_length=32)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("limit_train_batches", 3),
        ("limit_train_batches", 1),
        ("limit_train_batches", 0.5),
        ("max_epochs", 2),
        ("min_epochs", 2),
        ("min_steps", 5),
        ("max_time", "00:00:10:00"),
        ("fast_dev_run", 2),
    ],
)
def test_nothing_but_the_budget_ends_a_run(option: str, value: Any) -> None:
    """Each of these would end an epoch of the trainer, or the run, in the middle of a step."""
    options = {"max_epochs": -1, "logger": False, "accelerator": "cpu", option: value}
    with pytest.raises(DarlitError, match=rf"trainer\.{option} is not allowed: .*set budget\.tokens"):
        Budget().apply(pl.Trainer(**options), batch_size=2, sequence_length=64)


def test_repeating_a_few_batches_leaves_the_steps_whole() -> None:
    trainer = pl.Trainer(overfit_batches=3, max_epochs=-1, logger=False, accelerator="cpu")
    Budget(tokens=10_000, batch_tokens=1024).apply(trainer, batch_size=4, sequence_length=32)
    assert (trainer.limit_train_batches, trainer.accumulate_grad_batches) == (1.0, 8)


@pytest.mark.parametrize("options", [{"tokens": 1, "batch_tokens": 2}, {"batch_tokens": 0}, {"validation_interval": 0}])
def test_bad_budgets_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(DarlitError, match="budget"):
        Budget(**options)
