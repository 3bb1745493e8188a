"""The sparse feed-forward branch: parameters that all backends share, and the choice among these.

Shapes: B batch, T token, N = B T, D width, F hidden channels of an expert, E expert, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from darlit.backbone.config import BackboneConfig
from darlit.backbone.expert_parallel import ExpertGroup
from darlit.backbone.experts.routing import Routing, route, routing_losses


class Experts(nn.Module):
    """RMSNorm, a linear router, and E SwiGLU experts of which each token visits the k most probable.

    ``y = sum_j p_j out_j^T (silu(gate_j x) * up_j x)`` over a token's experts j, p the router's softmax over all E
    (arXiv 2409.02060). An expert's weights are F consecutive rows of ``gate``, ``up`` and ``out``, each ``[E F, D]``:
    the layout of megablocks, whose dMoE computes on these very parameters.

    Returns:
        The branch's output ``[B, T, D]``, and its `Routing`.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.num_experts * config.ffn_width
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.gate = nn.Parameter(torch.empty(rows, config.width))
        self.up = nn.Parameter(torch.empty(rows, config.width))
        self.out = nn.Parameter(torch.empty(rows, config.width))
        self._dropless = None
        if config.experts == "megablocks":
            from darlit.backbone.experts.dropless import Dropless

            self._dropless = Dropless(config)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing]:
        x_BTD = self.norm(x_BTD)
        if self._dropless is not None:
            return self._dropless(x_BTD, self.router.weight, self.gate, self.up, self.out)
        x_ND = x_BTD.flatten(0, -2)
        logits_NE = self.router(x_ND)
        scores_NE, weights_Nk, experts_Nk = route(
            logits_NE, self.config.experts_per_token, self.config.normalize_expert_weights
        )
        routing = routing_losses(logits_NE, scores_NE, experts_Nk)
        dtype = logits_NE.dtype  # of matrix products, which autocast may have narrowed
        matrices = [
            _local(weight).to(dtype).view(-1, self.config.ffn_width, self.config.width)
            for weight in (self.gate, self.up, self.out)
        ]
        compute: Callable[..., Tensor]
        if self.config.experts == "reference":
            from darlit.backbone.experts.reference import one_by_one as compute
        else:
            from darlit.backbone.experts.grouped import grouped as compute
        if isinstance(self.gate, DTensor):
            compute = ExpertGroup(self.gate.device_mesh.get_group(), compute)
        y_ND = compute(x_ND.to(dtype), weights_Nk, experts_Nk, routing.tokens_per_expert_E, *matrices)
        return y_ND.view_as(x_BTD), routing


def _local(weight: Tensor) -> Tensor:
    """The rows of the experts that this rank holds: all, unless they are split over ranks (see `expert_parallel`)."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
