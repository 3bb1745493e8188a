"""Where documents are: in a batch (from its separators) and in the sources (from the document table)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from darlit.data.manifest import Manifest, read_documents

if TYPE_CHECKING:
    from darlit.data.loader import TokenDataset


@dataclass(frozen=True)
class DocumentPlace:
    """A document: its number in the split, its source's path, its number (from 0) within that source."""

    document: int
    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.document} ({self.source} #{self.number})"


def documents_of_blocks(
    manifest: Manifest, split: str, dataset: TokenDataset, blocks: Sequence[int]
) -> list[list[DocumentPlace]]:
    """For every block the documents that have a token in it."""
    table = read_documents(manifest.folder, split)
    sources = manifest.content["sources"]
    found = []
    for block in blocks:
        first = dataset.first_token(block)
        low = int(np.searchsorted(table["start"], first, side="right")) - 1
        high = int(np.searchsorted(table["start"], first + dataset.block_size, side="left"))
        found.append(
            [
                DocumentPlace(i, sources[int(table["source"][i])]["path"], int(table["number"][i]))
                for i in range(low, high)
            ]
        )
    return found


def document_ids(tokens_BT: Tensor, separator: int) -> Tensor:
    """Number the documents of every sequence from 0: int64, of the shape of ``tokens_BT``.

    A separator belongs to the document that it ends. Two positions may attend to each other when their
    numbers are equal: ``ids[:, None, :, None] == ids[:, None, None, :]`` is the mask, beside the causal one.
    """
    ends_BT = tokens_BT == separator
    return torch.cumsum(ends_BT, dim=-1) - ends_BT.to(torch.int64)
