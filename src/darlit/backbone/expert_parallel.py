"""Experts that are split over the ranks of a group: tokens travel to their experts and come back.

Rank p of P holds experts ``p E/P`` to ``(p + 1) E/P - 1``. Every rank takes part in every exchange, also one whose
tokens all stay or that has none to compute, so that no rank waits for another.

Shapes: N token, D width, F hidden channels, E expert, k experts of a token, A = N k assignments of this rank's tokens,
R assignments that this rank computes, P rank, L = E / P local expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that share the experts of a layer; a call computes as `darlit.backbone.experts.grouped` does.

    Args:
        group: of P ranks.
        compute: what computes on local experts: ``grouped``, or another function of its arguments.
    """

    group: dist.ProcessGroup
    compute: Callable[..., Tensor]

    def __call__(
        self,
        x_ND: Tensor,
        weights_Nk: Tensor,
        experts_Nk: Tensor,
        tokens_per_expert_E: Tensor,
        gate_LFD: Tensor,
        up_LFD: Tensor,
        out_LFD: Tensor,
    ) -> Tensor:
        """``[N, D]``, the outputs of this rank's tokens, from the local experts' matrices of every rank."""
        ranks, local = self.group.size(), len(gate_LFD)
        order_A = experts_Nk.flatten().argsort(stable=True)
        to_PL = tokens_per_expert_E.view(ranks, local)
        from_PL = torch.empty_like(to_PL)
        dist.all_to_all_single(from_PL, to_PL.contiguous(), group=self.group)
        to, from_ = to_PL.sum(1).tolist(), from_PL.sum(1).tolist()

        x_RD = _Exchange.apply(x_ND[order_A // experts_Nk.shape[-1]], to, from_, self.group)
        expert_L = torch.arange(local, device=x_ND.device)
        expert_R = expert_L.repeat(ranks).repeat_interleave(from_PL.flatten(), output_size=len(x_RD))
        shared = [_AveragedGradient.apply(weight_LFD, ranks) for weight_LFD in (gate_LFD, up_LFD, out_LFD)]
        ones_R1 = weights_Nk.new_ones(len(x_RD), 1)
        y_RD = self.compute(x_RD, ones_R1, expert_R.unsqueeze(-1), from_PL.sum(0), *shared)
        y_AD = _Exchange.apply(y_RD, from_, to, self.group)

        place_Nk = order_A.argsort().view_as(experts_Nk)
        return (y_AD[place_Nk] * weights_Nk.unsqueeze(-1)).sum(1).to(x_ND.dtype)


class _Exchange(torch.autograd.Function):
    """Send consecutive rows to the ranks in turn; the gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], from_: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = from_, to, group
        return _exchanged(rows, to, from_, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], *ctx.back), None, None, None


def _exchanged(rows: Tensor, to: list[int], from_: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(from_), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), from_, to, group=group)
    return received


class _AveragedGradient(torch.autograd.Function):
    """Identity. An expert gets gradients of the losses of all P ranks, and training averages losses over ranks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.ranks, None
