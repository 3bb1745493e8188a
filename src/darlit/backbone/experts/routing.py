"""Which experts a token is sent to, and what keeps the router sane, as in OLMoE (arXiv 2409.02060).

Shapes: N token, D width, E expert, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """What one pass through a router did."""

    load_balancing: Tensor
    """``E sum_e f_e P_e``: f_e the share of all N k assignments that expert e got, P_e its mean probability; 1 at best.

    Without coefficient, float32. Its gradient goes through P alone.
    """
    z: Tensor
    """Mean over tokens of ``logsumexp(logits)^2``, without coefficient, float32."""
    tokens_per_expert_E: Tensor
    """Assignments that each expert got, integers; their sum is N k."""


def route(logits_NE: Tensor, experts_per_token: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities ``[N, E]`` (float32 or wider), and weights and indices ``[N, k]`` of the k largest of them.

    Args:
        normalize: divide the weights of a token by their sum.
    """
    scores_NE = logits_NE.softmax(-1, dtype=torch.promote_types(logits_NE.dtype, torch.float32))
    weights_Nk, experts_Nk = scores_NE.topk(experts_per_token, dim=-1)
    if normalize:
        weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
    return scores_NE, weights_Nk, experts_Nk


def routing_losses(logits_NE: Tensor, scores_NE: Tensor, experts_Nk: Tensor) -> Routing:
    """The losses of one router on one batch of tokens."""
    experts = scores_NE.shape[-1]
    chosen_A = experts_Nk.flatten()  # not counted with bincount, which has the host wait for the device
    counts_E = chosen_A.new_zeros(experts).scatter_add_(0, chosen_A, torch.ones_like(chosen_A))
    shares_E = counts_E.to(scores_NE.dtype) / experts_Nk.numel()
    load_balancing = experts * torch.dot(shares_E, scores_NE.mean(0))
    z = logits_NE.to(scores_NE.dtype).logsumexp(-1).square().mean()
    return Routing(load_balancing, z, counts_E)


def mean_routing(routings: Sequence[Routing]) -> Routing:
    """Losses averaged over layers, and all layers' counts side by side, ``[L, E]``."""
    load_balancing, z, tokens_per_expert_LE = (torch.stack(values) for values in zip(*routings, strict=True))
    return Routing(load_balancing.mean(), z.mean(), tokens_per_expert_LE)
