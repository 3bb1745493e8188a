"""Cross entropy of a linear head without ever keeping the logits of all tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def head_cross_entropy(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, chunk_tokens: int) -> Tensor:
    """Mean cross entropy in nats, in float32 or wider.

    Logits exist for ``chunk_tokens`` tokens at a time and are computed again in the backward pass, so that no
    ``[B T, V]`` tensor is kept. (torch's own chunked loss came after the oldest torch this package supports.)

    Raises:
        IndexError: a target id that is not below V.
    """
    hidden_ND, targets_N = hidden_BTD.flatten(0, -2), targets_BT.flatten()
    keep_logits = len(targets_N) <= chunk_tokens
    total = hidden_ND.new_zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
    for hidden_CD, targets_C in zip(hidden_ND.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True):
        if keep_logits or not torch.is_grad_enabled():
            total = total + _summed_loss(hidden_CD, weight_VD, targets_C)
        else:
            total = total + checkpoint(_summed_loss, hidden_CD, weight_VD, targets_C, use_reentrant=False)
    return total / len(targets_N)


def _summed_loss(hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor) -> Tensor:
    logits_CV = F.linear(hidden_CD, weight_VD)
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    return F.cross_entropy(logits_CV.to(wide), targets_C, reduction="sum")
