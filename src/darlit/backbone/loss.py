"""What a model is trained on: cross entropy, whose logits never all exist at once, and the losses of routers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from darlit.backbone.config import BackboneConfig
from darlit.backbone.experts import Routing

IGNORED = -100
"""The target id that counts in no loss, as torch has it."""


class Losses(NamedTuple):
    """Losses of one batch, scalars without coefficients."""

    cross_entropy: Tensor
    """Mean over the targets that count, in nats: what arms are compared by."""
    routing: Routing | None
    """Mean over layers of experts; None: there are none."""

    def total(self, config: BackboneConfig) -> Tensor:
        """What the optimiser sees."""
        if self.routing is None:
            return self.cross_entropy
        balancing, z = self.routing.load_balancing, self.routing.z
        return self.cross_entropy + config.load_balancing_weight * balancing + config.router_z_weight * z


def head_cross_entropy(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, chunk_tokens: int) -> Tensor:
    """Mean cross entropy in nats over all targets except `IGNORED`, in float32 or wider; 0 where none is left.

    Logits exist for ``chunk_tokens`` tokens at a time and are computed again in the backward pass, so that no
    ``[B T, V]`` tensor is kept. (torch's own chunked loss came after the oldest torch this package supports.)

    Raises:
        IndexError: a target id that is neither below V nor `IGNORED`.
    """
    hidden_ND, targets_N = hidden_BTD.flatten(0, -2), targets_BT.flatten()
    keep_logits = len(targets_N) <= chunk_tokens
    total = hidden_ND.new_zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
    for hidden_CD, targets_C in zip(hidden_ND.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True):
        if keep_logits or not torch.is_grad_enabled():
            total = total + _summed_loss(hidden_CD, weight_VD, targets_C)
        else:
            total = total + checkpoint(_summed_loss, hidden_CD, weight_VD, targets_C, use_reentrant=False)
    return total / (targets_N != IGNORED).sum().clamp(min=1)


def _summed_loss(hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor) -> Tensor:
    logits_CV = F.linear(hidden_CD, weight_VD)
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    return F.cross_entropy(logits_CV.to(wide), targets_C, reduction="sum", ignore_index=IGNORED)
