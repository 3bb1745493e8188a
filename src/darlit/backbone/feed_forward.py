"""The feed-forward slot: ``[B, T, D]`` to ``[B, T, D]`` and, of a sparse branch, its routing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from darlit.backbone.config import BackboneConfig
from darlit.backbone.experts import Experts, Routing


class SwiGLU(nn.Module):
    """``W_down (silu(W_gate x) * W_up x)`` after an RMSNorm (GLU variants, arXiv 2002.05202)."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.gate_up = nn.Linear(config.width, 2 * config.ffn_width, bias=False)
        self.out = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing | None]:
        gate, up = self.gate_up(self.norm(x_BTD)).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up), None


def build_feed_forward(config: BackboneConfig) -> nn.Module:
    """The feed-forward branch that ``config`` asks for; its norm is inside."""
    return Experts(config) if config.num_experts else SwiGLU(config)
