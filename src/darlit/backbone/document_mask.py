"""Attention that does not cross documents, although a sequence holds several."""

from __future__ import annotations

import torch
from torch import Tensor


def document_numbers(tokens_BT: Tensor, separator: int) -> Tensor:
    """Number the documents of every sequence from 0, int64 ``[B, T]``; a separator belongs to the one that it ends."""
    ends_BT = tokens_BT == separator
    return ends_BT.cumsum(-1) - ends_BT.long()


def document_mask(document_BS: Tensor, start: int = 0) -> Tensor:
    """Which tokens may be attended to: the token itself and earlier ones of its own document, bool ``[B, 1, T, S]``.

    Args:
        document_BS: the document of every token so far.
        start: the first of the T tokens that attend, which are the last ones: S = start + T.
    """
    same_BTS = document_BS[:, start:, None] == document_BS[:, None, :]
    return same_BTS.tril(start).unsqueeze(1)


def causal_mask(length: int, start: int, device: torch.device) -> Tensor:
    """The same where documents do not matter, bool ``[T, S]`` with S = length and T = length - start."""
    return torch.ones(length - start, length, dtype=torch.bool, device=device).tril(start)
