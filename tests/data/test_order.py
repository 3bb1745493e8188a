from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darlit.data.errors import DataError
from darlit.data.order import FILLER, BatchOrder, EvaluationOrder, shuffled


def test_order_is_pinned() -> None:
    """A change here changes the data order of every run and makes checkpoints unresumable."""
    assert shuffled(8, seed=0, epoch=0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert shuffled(8, seed=0, epoch=1).tolist() == [3, 7, 4, 2, 1, 6, 5, 0]
    assert shuffled(8, seed=1, epoch=0).tolist() == [2, 0, 1, 4, 5, 6, 7, 3]


def test_every_block_once() -> None:
    assert np.array_equal(np.sort(shuffled(10_000, 3, 5)), np.arange(10_000))


@given(
    blocks=st.integers(1, 200),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    seed=st.one_of(st.none(), st.integers(0, 9)),
    epoch=st.integers(0, 3),
)
def test_ranks_share_one_global_order(
    blocks: int, batch_size: int, world_size: int, seed: int | None, epoch: int
) -> None:
    """Equal counts of full batches, no block twice, and the order that one rank alone would have."""
    if blocks < batch_size * world_size:
        with pytest.raises(DataError, match="one batch needs"):
            BatchOrder(blocks, batch_size, 0, world_size, seed)
        return
    ranks = [BatchOrder(blocks, batch_size, rank, world_size, seed) for rank in range(world_size)]
    epochs = [order.epoch(epoch) for order in ranks]
    assert {batches.shape for batches in epochs} == {(len(ranks[0]), batch_size)}
    together = np.concatenate(epochs, axis=1)
    alone = BatchOrder(blocks, batch_size * world_size, 0, 1, seed).epoch(epoch)
    assert np.array_equal(together, alone)
    assert len(np.unique(together)) == together.size


def test_take_spreads_evenly_and_keeps_order() -> None:
    order = EvaluationOrder(100, 5, take=10)
    assert np.concatenate(order.epoch()).tolist() == list(range(0, 100, 10))
    assert np.array_equal(order.epoch(0), order.epoch(7))


@given(
    blocks=st.integers(1, 60),
    batch_size=st.integers(1, 8),
    world_size=st.integers(1, 5),
    taken=st.floats(0, 1),
)
def test_evaluation_takes_every_chosen_block_once(blocks: int, batch_size: int, world_size: int, taken: float) -> None:
    """The same blocks for any batch size and number of ranks, in order; equally many batches on every rank."""
    take = max(1, round(taken * blocks))
    ranks = [EvaluationOrder(blocks, batch_size, rank, world_size, take).epoch() for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {-(-take // (batch_size * world_size))}
    assert all(1 <= len(rows) <= batch_size for batches in ranks for rows in batches)
    together = np.concatenate([rows for batches in zip(*ranks, strict=True) for rows in batches])
    assert np.array_equal(together[together != FILLER], np.arange(take) * blocks // take)
    assert (together == FILLER).sum() < world_size


def test_max_batches() -> None:
    limited, whole = BatchOrder(100, 5, seed=0, max_batches=3), BatchOrder(100, 5, seed=0)
    assert len(limited) == 3
    assert np.array_equal(limited.epoch(1), whole.epoch(1)[:3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0 must be at least 1"),
        ({"batch_size": 200}, "the data has 100 sequences, one batch needs 200"),
        ({"batch_size": 5, "rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
    ],
)
def test_bad_orders(options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        BatchOrder(100, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0 must be at least 1"),
        ({"batch_size": 5, "rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
        ({"batch_size": 5, "take": 101}, "101 sequences asked for: the data has 100"),
    ],
)
def test_bad_evaluation_orders(options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        EvaluationOrder(100, **options)
