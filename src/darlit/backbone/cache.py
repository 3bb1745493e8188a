"""Keys, values and documents of the tokens that a model has seen, so that one more token costs one token.

A pathway needs no cache: its depth history belongs to one token, and every new token starts its own.

Shapes: B sequence, H head, T token, E = D / H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from darlit.backbone.config import BackboneConfig
from darlit.backbone.document_mask import document_numbers


class LayerCache:
    """One layer's keys and values: two buffers ``[B, H, capacity, E]``, of which ``length`` tokens are filled."""

    def __init__(self, keys_BHTE: Tensor, values_BHTE: Tensor) -> None:
        self.length = 0
        self._keys_BHTE = keys_BHTE
        self._values_BHTE = values_BHTE

    def extend(self, key_BHTE: Tensor, value_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; returns those of all tokens so far."""
        start, self.length = self.length, self.length + key_BHTE.shape[2]
        self._keys_BHTE[:, :, start : self.length] = key_BHTE
        self._values_BHTE[:, :, start : self.length] = value_BHTE
        return self._keys_BHTE[:, :, : self.length], self._values_BHTE[:, :, : self.length]


class KeyValueCache:
    """Room for ``config.sequence_length`` tokens of ``batch_size`` sequences in every layer.

    Args:
        config: shape of the model that it serves.
        batch_size: B.
        like: its dtype and device are the cache's.
    """

    def __init__(self, config: BackboneConfig, batch_size: int, like: Tensor) -> None:
        shape = (batch_size, config.num_heads, config.sequence_length, config.head_width)
        self.layers = [LayerCache(like.new_empty(shape), like.new_empty(shape)) for _ in range(config.num_layers)]
        self._tokens_BT = torch.empty(batch_size, config.sequence_length, dtype=torch.long, device=like.device)

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length

    def documents(self, tokens_BT: Tensor, separator: int) -> Tensor:
        """Number the documents of all tokens so far, int64 ``[B, S]``: those that the layers hold, then these."""
        end = self.length + tokens_BT.shape[1]
        self._tokens_BT[:, self.length : end] = tokens_BT
        return document_numbers(self._tokens_BT[:, :end], separator)
