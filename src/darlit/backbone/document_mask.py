"""Attention that does not cross documents, although a sequence holds several."""

from __future__ import annotations

from torch import Tensor


def document_mask(tokens_BT: Tensor, separator: int) -> Tensor:
    """Which tokens each token may attend to: itself and earlier ones of its own document, bool ``[B, 1, T, T]``.

    A separator belongs to the document that it ends.
    """
    ends_BT = tokens_BT == separator
    document_BT = ends_BT.cumsum(-1) - ends_BT.long()
    same_BTT = document_BT.unsqueeze(-1) == document_BT.unsqueeze(-2)
    return same_BTT.tril().unsqueeze(1)
