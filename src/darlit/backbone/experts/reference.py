"""The oracle: experts one after the other, in plain PyTorch.

Shapes: N token, D width, F hidden channels, E expert, k experts of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def one_by_one(
    x_ND: Tensor,
    weights_Nk: Tensor,
    experts_Nk: Tensor,
    tokens_per_expert_E: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    out_EFD: Tensor,
) -> Tensor:
    """``[N, D]`` in the dtype of ``x_ND``: every expert on its tokens, weighted and added up."""
    del tokens_per_expert_E
    y_ND = torch.zeros_like(x_ND)
    for expert in range(len(gate_EFD)):
        token, choice = torch.where(experts_Nk == expert)
        x_CD = x_ND[token]
        hidden_CF = F.silu(x_CD @ gate_EFD[expert].T) * (x_CD @ up_EFD[expert].T)
        weighted_CD = (hidden_CF @ out_EFD[expert]) * weights_Nk[token, choice].unsqueeze(-1)
        y_ND = y_ND.index_add(0, token, weighted_CD.to(y_ND.dtype))
    return y_ND
