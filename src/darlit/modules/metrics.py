"""Language-model metrics as one torchmetrics metric."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenLoss(Metric):
    """Mean token loss over all batches and ranks, and what follows from it.

    ``compute`` returns ``loss`` (nats per token), ``perplexity``, and ``bits_per_byte``, which makes runs with
    different tokenizers comparable.
    """

    full_state_update = False
    loss_sum: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bytes_per_token = 1.0
        self.add_state("loss_sum", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, loss: Tensor, num_tokens: int) -> None:
        """Add the mean ``loss`` of ``num_tokens`` tokens."""
        self.loss_sum += loss.detach().double() * num_tokens
        self.tokens += num_tokens

    def compute(self) -> dict[str, Tensor]:
        loss = self.loss_sum / self.tokens
        return {
            "loss": loss,
            "perplexity": loss.exp(),
            "bits_per_byte": loss / math.log(2) / self.bytes_per_token,
        }
