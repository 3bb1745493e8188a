"""Which blocks are in which batch, for training and for evaluation, with any number of ranks and workers.

The order of all training blocks is a function of (seed, epoch) alone. A global batch is the next ``batch_size ×
world_size`` blocks of it, and each rank takes its own row of that. So ranks see the same number of full
batches, workers change nothing, and the position of a run is one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darlit.data.errors import DataError

FILLER = -1
"""Instead of a block number: a row that only keeps a rank without data in step with the others."""


def shuffled(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of ``range(size)``, the same on every machine and with every numpy.

    Blocks are sorted by 64 random bits from Philox keyed by (seed, epoch); the raw bits of numpy's bit
    generators are stable across its versions, its shuffling methods need not be. Needs 24 bytes a block
    while it sorts and 8 afterwards.
    """
    key = np.random.SeedSequence((seed, epoch))
    return np.argsort(np.random.Philox(key).random_raw(size), kind="stable")


@dataclass(frozen=True)
class BatchOrder:
    """Batches of block numbers for one rank: epochs without end, full batches only.

    Args:
        blocks: how many blocks there are.
        batch_size: blocks a rank and micro-batch.
        rank, world_size: this data-parallel rank of how many.
        seed: order of the epochs; ``None`` keeps the blocks' own order in every epoch.
        max_batches: end an epoch after this many batches.
    """

    blocks: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int | None = None
    max_batches: int | None = None

    def __post_init__(self) -> None:
        _check_ranks(self.batch_size, self.rank, self.world_size)
        if self.blocks < self.global_batch:
            raise DataError(
                f"the data has {self.blocks} sequences, one batch needs {self.global_batch} "
                f"({self.world_size} ranks of batch_size {self.batch_size}); "
                "lower batch_size or sequence_length, or prepare more data"
            )

    @property
    def global_batch(self) -> int:
        """Blocks that all ranks take together."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Batches of this rank an epoch, the same for all ranks; blocks that fill no batch are left out."""
        full = self.blocks // self.global_batch
        return full if self.max_batches is None else min(full, self.max_batches)

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Block numbers of one epoch, ``[batches, batch_size]``."""
        order_N = np.arange(self.blocks) if self.seed is None else shuffled(self.blocks, self.seed, epoch)
        order_N = order_N[: len(self) * self.global_batch]
        return order_N.reshape(len(self), self.world_size, self.batch_size)[:, self.rank]

    def identity(self) -> dict[str, Any]:
        """What must stay the same for a position in this order to keep its meaning."""
        return {"blocks": self.blocks, "seed": self.seed, "global_batch": self.global_batch}


@dataclass(frozen=True)
class EvaluationOrder:
    """Batches of block numbers for one rank: every chosen block once, on exactly one rank, in the order of the split.

    The last global batch may be short. A rank for which it holds no block gets one `FILLER` row, because all ranks
    must make the same number of forward passes. Read batch by batch and rank by rank, the blocks are in order.

    Args:
        blocks: how many blocks there are.
        batch_size: blocks a rank and batch.
        rank, world_size: this data-parallel rank of how many.
        take: use this many blocks, spread evenly over all; default all.
    """

    blocks: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    take: int | None = None

    def __post_init__(self) -> None:
        _check_ranks(self.batch_size, self.rank, self.world_size)
        if self.take is not None and not 1 <= self.take <= self.blocks:
            raise DataError(f"{self.take} sequences asked for: the data has {self.blocks}; lower the number")

    @property
    def used(self) -> int:
        """Blocks that are evaluated, over all ranks."""
        return self.blocks if self.take is None else self.take

    def __len__(self) -> int:
        """Batches of this rank, the same for all ranks."""
        return -(-self.used // (self.batch_size * self.world_size))

    def epoch(self, epoch: int = 0) -> list[NDArray[np.int64]]:
        """Block numbers of every batch, each of 1 to ``batch_size`` rows; the same in every epoch."""
        chosen_N = np.arange(self.used) * self.blocks // self.used
        first = np.arange(len(self)) * self.world_size * self.batch_size + self.rank * self.batch_size
        rows = [chosen_N[start : start + self.batch_size] for start in first]
        return [row if len(row) else np.array([FILLER]) for row in rows]

    def identity(self) -> dict[str, Any]:
        """What must stay the same for a position in this order to keep its meaning."""
        return {"blocks": self.used, "global_batch": self.batch_size * self.world_size}


def _check_ranks(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise DataError(f"batch_size {batch_size} must be at least 1")
    if not 0 <= rank < world_size:
        raise DataError(f"rank {rank} is not one of {world_size} ranks")
