"""The order of training: which blocks make the batch number n of an epoch, for any number of ranks and workers.

The order of all blocks is a function of (seed, epoch) alone. A global batch is the next ``batch_size ×
world_size`` blocks of it, and each rank takes its own row of that. So ranks see the same number of full
batches, workers change nothing, and a run's place is one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darlit.data.errors import DataError


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
    """Batches of block numbers for one rank.

    Args:
        blocks: how many blocks there are.
        batch_size: blocks a rank and micro-batch.
        rank, world_size: this data-parallel rank of how many.
        seed: order of the epochs; ``None`` keeps the blocks' own order in every epoch.
        max_batches: end an epoch after so many batches.
        take: use only so many blocks, spread evenly over all.
    """

    blocks: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int | None = None
    max_batches: int | None = None
    take: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size {self.batch_size} must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"rank {self.rank} is not one of {self.world_size} ranks")
        if self.take is not None and not 1 <= self.take <= self.blocks:
            raise DataError(f"{self.take} sequences asked for: the data has {self.blocks}; lower the number")
        if self.used < self.global_batch:
            raise DataError(
                f"the data has {self.used} sequences, one batch needs {self.global_batch} "
                f"({self.world_size} ranks of batch_size {self.batch_size}); "
                "lower batch_size or sequence_length, or prepare more data"
            )

    @property
    def used(self) -> int:
        """Blocks that an epoch draws from."""
        return self.blocks if self.take is None else self.take

    @property
    def global_batch(self) -> int:
        """Blocks that all ranks take together."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Batches of this rank an epoch, the same for all ranks; blocks that fill no batch are left out."""
        full = self.used // self.global_batch
        return full if self.max_batches is None else min(full, self.max_batches)

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Block numbers of one epoch, ``[batches, batch_size]``."""
        order_N = np.arange(self.used) if self.seed is None else shuffled(self.used, self.seed, epoch)
        order_N = order_N[: len(self) * self.global_batch] * self.blocks // self.used
        return order_N.reshape(len(self), self.world_size, self.batch_size)[:, self.rank]

    def identity(self) -> dict[str, Any]:
        """What must stay the same for a place in this order to keep its meaning."""
        return {"blocks": self.used, "seed": self.seed, "global_batch": self.global_batch}
