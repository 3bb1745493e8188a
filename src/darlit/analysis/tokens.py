"""The tokens that an analysis runs over: sequences of prepared validation data, or of a text file.

Shapes: B sequence, T token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from darlit.data.loader import TokenDataset
from darlit.data.order import EvaluationOrder
from darlit.data.tokenizers import InvalidTextError
from darlit.errors import DarlitError
from darlit.modules.loading import SavedModel


@dataclass(frozen=True)
class TokenBatches(Sequence[Tensor]):
    """Batches ``[B, T]`` of int64 ids on a device, read when they are asked for, the same each time."""

    read: Callable[[list[int]], Tensor]
    """Sequences ``[B, T]`` by their numbers."""
    numbers: list[list[int]]
    device: torch.device
    source: dict[str, Any]
    """What the tokens are, for a record."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, batch: Any) -> Any:
        return self.read(self.numbers[batch]).to(self.device)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[batch] for batch in range(len(self)))


@dataclass(frozen=True)
class TokenRequest:
    """Which tokens, and how many.

    Args:
        tokens: at least so many; the last batch is full.
        batch_size: B.
        sequence_length: T; default the model's.
        data: prepared folder, whose validation split is read; default the run's.
        text: a text file instead.
        tokenizer: for a text; default the model's.
    """

    tokens: int = 8192
    batch_size: int = 16
    sequence_length: int | None = None
    data: Path | None = None
    text: Path | None = None
    tokenizer: str | None = None

    def batches(self, saved: SavedModel, device: torch.device) -> TokenBatches:
        """The batches for one model.

        Raises:
            DarlitError: fewer tokens than asked for, no such data or text, or another vocabulary than the model's.
        """
        longest = saved.module.backbone.sequence_length
        length = self.sequence_length or longest
        if not 1 <= length <= longest:
            raise DarlitError(f"--sequence-length {length} is not allowed; {saved.path} takes 1 to {longest} tokens")
        read, available, source = self._text(saved, length) if self.text else self._validation(saved, length)
        batches = -(-self.tokens // (length * self.batch_size))
        if batches * self.batch_size > available:
            raise DarlitError(
                f"{source['where']} has {available} sequences of {length} tokens, --tokens {self.tokens} with "
                f"--batch-size {self.batch_size} needs {batches * self.batch_size}; lower them or give more text"
            )
        order = EvaluationOrder(available, self.batch_size, take=batches * self.batch_size)
        record = {**source, "sequence_length": length, "batch_size": self.batch_size}
        return TokenBatches(read, [blocks.tolist() for blocks in order.epoch()], device, record)

    def _validation(self, saved: SavedModel, length: int) -> tuple[Callable[[list[int]], Tensor], int, dict[str, Any]]:
        manifest = saved.manifest(self.data)
        dataset = TokenDataset(manifest, "val", length)
        # The folder's name and not its path, which is another on every machine: the fingerprint says what it holds.
        source = {"where": f"{manifest.folder.name}/val", "fingerprint": manifest.fingerprint}
        return lambda numbers: dataset.__getitems__(numbers)[:, :-1], len(dataset), source

    def _text(self, saved: SavedModel, length: int) -> tuple[Callable[[list[int]], Tensor], int, dict[str, Any]]:
        assert self.text is not None
        tokenizer = saved.tokenizer(self.tokenizer)
        try:
            ids, _ = tokenizer.encode_batch([self.text.read_bytes()])
        except OSError as error:
            raise DarlitError(f"--text {self.text}: cannot be read: {error.strerror}; give a text file") from error
        except InvalidTextError as error:
            raise DarlitError(
                f"--text {self.text} is not UTF-8 (byte {error.offset}), which tokenizer {tokenizer.name!r} needs; "
                "convert it"
            ) from error
        available = len(ids) // length
        sequences_NT = torch.from_numpy(ids[: available * length].astype("int64")).view(-1, length)
        return lambda numbers: sequences_NT[numbers], available, {"where": str(self.text)}
