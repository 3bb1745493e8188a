"""Language-model metrics as one torchmetrics metric."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from darlit.backbone.loss import IGNORED


class TokenLoss(Metric):
    """Mean loss over all scored targets of all batches and ranks, and what follows from it.

    A scored target is one that is not `IGNORED`. ``compute`` returns ``loss`` (nats per token), ``perplexity``,
    ``bits_per_byte`` (total loss over the text bytes of the scored targets, which makes runs with different tokenizers
    comparable), ``bytes_per_token`` and ``tokens`` (number of scored targets).
    """

    full_state_update = False
    loss_sum: Tensor
    tokens: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.token_bytes: Tensor | None = None
        """Text bytes of every token id, int64 ``[V]``; None counts every token as one byte."""
        self.add_state("loss_sum", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("bytes", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, loss: Tensor, targets_BT: Tensor) -> None:
        """Add the mean ``loss`` of the targets that count, a scalar."""
        scored_N = targets_BT[targets_BT != IGNORED]
        self.loss_sum += loss.detach().double() * len(scored_N)
        self.tokens += len(scored_N)
        if self.token_bytes is None:
            self.bytes += len(scored_N)
        else:
            self.token_bytes = self.token_bytes.to(scored_N.device)
            self.bytes += self.token_bytes[scored_N].sum()

    def compute(self) -> dict[str, Tensor]:
        loss = self.loss_sum / self.tokens
        return {
            "loss": loss,
            "perplexity": loss.exp(),
            "bits_per_byte": self.loss_sum / math.log(2) / self.bytes.clamp(min=1),
            "bytes_per_token": self.bytes / self.tokens,
            "tokens": self.tokens,
        }
