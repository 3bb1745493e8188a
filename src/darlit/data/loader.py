"""Reading prepared tokens: blocks by number, and a loader that resumes bit-exactly.

Shape suffixes: B sequences a batch, S tokens a block, which is sequence_length + 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from darlit.data.chunks import HEADER
from darlit.data.errors import DataError
from darlit.data.manifest import Manifest
from darlit.data.order import FILLER, BatchOrder, EvaluationOrder

FILLING = -100
"""Every token of a filler row: as a target torch's losses ignore it."""


class TokenDataset(Dataset[Tensor]):
    """The blocks of one split: ``len()`` of them, each int64 ``[sequence_length + 1]``.

    A chunk of n tokens gives n // (sequence_length + 1) blocks that do not overlap; what is left of it is
    not used. Any sequence length up to a chunk's size can be read from the same folder.

    Raises:
        DataError: the sequence length is longer than every chunk of the split.
    """

    def __init__(self, manifest: Manifest, split: str, sequence_length: int) -> None:
        manifest.check_length(sequence_length, split)
        chunks = manifest.split(split)["chunks"]
        self.folder = Path(manifest.folder) / split
        self._vocab_size = manifest.vocab_size
        self._dtype = np.dtype(manifest.content["dtype"])
        self._chunks = [self.folder / chunk["file"] for chunk in chunks]
        self._states = [_state(path) for path in self._chunks]
        self.block_size = sequence_length + 1
        self._first_tokens = np.array([chunk["first_token"] for chunk in chunks])
        blocks = np.array([chunk["tokens"] // self.block_size for chunk in chunks])
        self._ends = np.cumsum(blocks)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, block: int) -> Tensor:
        return self.__getitems__([block])[0]

    def __getitems__(self, blocks: list[int]) -> Tensor:
        """A batch ``tokens_BS``, int64, in one go; a `FILLER` block is a row of `FILLING`."""
        filler_S = np.full(self.block_size, FILLING)
        rows = [filler_S if block == FILLER else self._read(block) for block in blocks]
        return torch.from_numpy(np.stack(rows))

    def first_token(self, block: int) -> int:
        """The block's place in the split's stream of tokens."""
        chunk = self._chunk_of(block)
        before = int(self._ends[chunk - 1]) if chunk else 0
        return int(self._first_tokens[chunk]) + (block - before) * self.block_size

    def _chunk_of(self, block: int) -> int:
        return int(np.searchsorted(self._ends, block, side="right"))

    def _read(self, block: int) -> np.ndarray:
        """Tokens of a block, int64 ``[S]``.

        Read and not mapped into memory: a mapped file that becomes shorter ends the process without a word.

        Raises:
            DataError: a chunk that has changed since the dataset was made, or an id beyond the vocabulary.
        """
        chunk = self._chunk_of(block)
        path, place = self._chunks[chunk], self.first_token(block) - int(self._first_tokens[chunk])
        changed = _state(path) != self._states[chunk]
        offset = HEADER.size + place * self._dtype.itemsize
        tokens_S = np.fromfile(path, self._dtype, self.block_size, offset=offset)
        if changed or len(tokens_S) < self.block_size:
            raise DataError(f"{path}: changed while it was in use; verify the folder and resume the run")
        if tokens_S.max() >= self._vocab_size:
            raise DataError(
                f"{path}: damaged: token id {tokens_S.max()} in a vocabulary of {self._vocab_size}; "
                f"type: darlit data verify {self.folder.parent}"
            )
        return tokens_S.astype(np.int64)


def _state(path: Path) -> tuple[int, int, int]:
    """What changes when a file is cut, overwritten or replaced."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; verify the folder and resume the run") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


class ResumableLoader:
    """Batches ``tokens_BS`` (int64) of one rank, one epoch of the order after another, from a position that is saved.

    The position is the number of batches yielded so far. It moves when a batch is yielded, so it is right with any
    number of workers. Each ``iter()`` goes on from it, up to the next multiple of ``len()``. Nothing is skipped or
    repeated when an iteration is left early. `length` may span many epochs of the order: a trainer then sees the
    complete run as one epoch of its own, and no epoch ends in the middle of an accumulated step. Only an
    `EvaluationOrder` starts again with every ``iter()``.

    Not a DataLoader itself: trainers then leave its order alone instead of adding a sampler of their own.

    Args:
        dataset: the blocks.
        order: which block is in which batch.
        identity: what else must be equal for a saved position to be valid, such as the data's fingerprint.
        length: batches until an iteration ends; default one epoch of the order.
        num_workers, pin_memory: of the DataLoader inside.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        order: BatchOrder | EvaluationOrder,
        identity: dict[str, Any],
        *,
        length: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.seconds_waited = 0.0
        """Wall time that consumers have waited for batches so far."""
        self._length = len(order) if length is None else length
        self._identity = {**identity, "sequence_length": dataset.block_size - 1, **order.identity()}
        self._position = _Position()
        self._iteration: object | None = None
        self._loader: DataLoader[Tensor] = DataLoader(
            dataset,
            batch_sampler=_Remaining(order, self._position, self._length),
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=_as_is,
            # DataLoader draws a seed for every epoch; from the global generator it would disturb dropout.
            generator=torch.Generator().manual_seed(0),
        )

    def __len__(self) -> int:
        """Batches of a complete iteration."""
        return self._length

    def __iter__(self) -> Iterator[Tensor]:
        # All of this runs at the first next(): an iterator that is made and dropped moves nothing.
        asked = time.perf_counter()
        self._iteration = mine = object()
        if isinstance(self.order, EvaluationOrder):
            self._position.batches = 0
        for tokens_BS in _in_one_line(self._loader):
            self._position.batches += 1
            self.seconds_waited += time.perf_counter() - asked
            yield tokens_BS
            asked = time.perf_counter()
            if self._iteration is not mine:
                raise RuntimeError("this loader was iterated again; an earlier iterator of it cannot go on")

    @property
    def batches_given(self) -> int:
        """How many batches were yielded, over all epochs."""
        return self._position.batches

    def blocks_of(self, batch: int) -> list[int]:
        """Block numbers of this rank's batch number ``batch``, counted from 0 over all epochs."""
        epoch, number = divmod(batch, len(self.order))
        return [int(block) for block in self.order.epoch(epoch)[number]]

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._position.batches, "identity": {**self._identity}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            DataError: the position was saved with other data, order or global batch, where it means nothing.
        """
        saved = state["identity"]
        for name, value in self._identity.items():
            if saved.get(name) != value:
                raise DataError(_why_not_resumed(name, saved.get(name), value))
        self._position.batches = int(state["batches"])


def _why_not_resumed(name: str, saved: Any, now: Any) -> str:
    remedies = {
        "fingerprint": "give the same data folder",
        "global_batch": "keep ranks x batch_size the same (ranks and workers may change)",
        "blocks": "give the same data folder and sequence_length",
    }
    remedy = remedies.get(name, f"set {name} as it was")
    return (
        f"cannot resume the data: the checkpoint has {name} {saved!r}, this run {now!r}; {remedy}, "
        "or load the weights alone"
    )


@dataclass
class _Position:
    """Batches yielded so far."""

    batches: int = 0


@dataclass(frozen=True)
class _Remaining:
    """The batch sampler inside the loader: what is left of the current iteration.

    It knows the position and not the loader: no reference cycle keeps the workers of a dropped loader alive.
    """

    order: BatchOrder | EvaluationOrder
    position: _Position
    length: int

    def __len__(self) -> int:
        return self.length - self.position.batches % self.length

    def __iter__(self) -> Iterator[list[int]]:
        first, size = self.position.batches, len(self.order)
        last = first + len(self)
        while first < last:
            epoch, number = divmod(first, size)
            for blocks in self.order.epoch(epoch)[number : number + last - first]:
                yield blocks.tolist()
            first += min(size - number, last - first)


def _in_one_line(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Batches, with the line of a DataError that a worker process sends with its traceback."""
    try:
        yield from batches
    except DataError as error:
        last = str(error).strip().splitlines()[-1]
        raise DataError(last.rpartition(f"{DataError.__name__}: ")[2]) from error


def _as_is(batch: Any) -> Any:
    return batch  # the dataset has made a tensor of it
