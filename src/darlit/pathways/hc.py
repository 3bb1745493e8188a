"""Hyper-Connections (HC, arXiv 2409.19606): n streams, with learned mixtures into and out of every branch.

    H^ = B^T f(A_m^T H) + A_r^T H            H: n x D, the streams; B: 1 x n, A_m: n x 1, A_r: n x n

Static connections are parameters. Dynamic ones add a part that depends on the token, computed for each stream h:

    A_m[h] = A_m + s_alpha tanh(RMSNorm(h) W_m)
    A_r[h] = A_r + s_alpha tanh(RMSNorm(h) W_r)        row h of A_r: what stream h gives to every stream
    B[h]   = B   + s_beta  tanh(RMSNorm(h) W_beta)

The norm has no gain, a gain would fold into W [ours]. Streams start as n copies of the embedding and are summed at the
end.

At initialisation B = 1, A_m = e_{i mod n} for branch i, A_r = identity and W = 0: every stream is the residual sum and
so is what a branch reads, to the last bit. The sum of the streams is n times the residual sum: the final norm divides
the scale out again up to its eps, relative difference to the standard residual at most
``eps (1 - 1 / n^2) / (2 mean(x^2))`` with x the residual sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from darlit.errors import DarlitError
from darlit.ops import reference
from darlit.ops.dispatch import IMPLEMENTATIONS
from darlit.pathways.contract import PathwayOptions, Streams, check_option
from darlit.pathways.cost import Cost, streams_cost
from darlit.pathways.streams import KernelGates, Mixing, WidenedStreams


@dataclass(frozen=True)
class HCOptions(PathwayOptions):
    """Options of Hyper-Connections.

    Args:
        num_streams: n.
        connections: static, or dynamic: a static part and a part per token.
        dynamic_scale: s_alpha and s_beta at the start; connections=dynamic only.
    """

    num_streams: int = 4
    connections: Literal["static", "dynamic"] = "dynamic"
    dynamic_scale: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("num_streams", self.num_streams, self.num_streams >= 1, "at least 1")
        check_option("dynamic_scale", self.dynamic_scale, self.dynamic_scale > 0, "above 0")
        if self.connections == "static" and self.dynamic_scale != type(self).dynamic_scale:
            raise DarlitError(
                f"dynamic_scale={self.dynamic_scale} with connections='static' has nothing to scale; "
                "leave it out or set connections='dynamic'"
            )


class HC(WidenedStreams):
    """n streams. State kept: the n streams.

    Parameters per branch: n (n + 2) scalars; dynamic ones add (n + 2) D and two scales.
    """

    name = "hyper_connections"
    title = "Hyper-Connections"
    source = "arXiv 2409.19606"
    keeps = "the streams"
    Options = HCOptions
    implementations = IMPLEMENTATIONS

    def __init__(self, num_branches: int, width: int, options: HCOptions, norm_eps: float) -> None:
        super().__init__(num_branches, width, options, norm_eps)
        n = options.num_streams
        self.dynamic = options.connections == "dynamic"
        self.pre_IN = nn.Parameter(torch.empty(num_branches, n))
        self.post_IN = nn.Parameter(torch.empty(num_branches, n))
        self.res_INN = nn.Parameter(torch.empty(num_branches, n, n))
        if self.dynamic:
            # Per branch the rows W_m, W_beta and then W_r, one for each stream that is written.
            self.projection_ICD = nn.Parameter(torch.empty(num_branches, n + 2, width))
            self.alpha_scale_I = nn.Parameter(torch.empty(num_branches))
            self.beta_scale_I = nn.Parameter(torch.empty(num_branches))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        n = self.num_streams
        with torch.no_grad():
            self.pre_IN.copy_(torch.eye(n)[torch.arange(self.num_branches) % n])
            self.post_IN.fill_(1.0)
            self.res_INN.copy_(torch.eye(n).expand_as(self.res_INN))
            if self.dynamic:
                self.projection_ICD.zero_()
                self.alpha_scale_I.fill_(self.options.dynamic_scale)
                self.beta_scale_I.fill_(self.options.dynamic_scale)

    def mixing(self, branch: int, streams: Streams) -> Mixing:
        pre, post, res = (reference.upcast(table[branch]) for table in (self.pre_IN, self.post_IN, self.res_INN))
        if self.dynamic:
            alpha, beta = (reference.upcast(scale[branch]) for scale in (self.alpha_scale_I, self.beta_scale_I))
            rows_CD = self.projection_ICD[branch]
            logits = [reference.depth_logits(stream_BTD, rows_CD, self.norm_eps) for stream_BTD in streams]
            # C last, N before it: entry [s, c] is what stream s says about connection c.
            parts_BTNC = torch.stack(logits, dim=-2).tanh()
            pre = pre + alpha * parts_BTNC[..., 0]
            post = post + beta * parts_BTNC[..., 1]
            res = res + alpha * parts_BTNC[..., 2:]
        # A_r is stored as in the paper, row: the stream it comes from. `Mixing.res` has the stream written first.
        return Mixing(pre, post, res.transpose(-2, -1))

    def kernel_gates(self) -> KernelGates:
        res_INN = self.res_INN.transpose(1, 2)
        if not self.dynamic:
            write_INC = torch.cat([res_INN, self.post_IN.unsqueeze(-1)], dim=-1)
            return KernelGates("hc", [], torch.cat([self.pre_IN, write_INC.flatten(1)], dim=1).unbind(0))
        scales = (self.alpha_scale_I[:, None], self.beta_scale_I[:, None])
        parameters = torch.cat([self.pre_IN, self.post_IN, res_INN.flatten(1), *scales], dim=1).unbind(0)
        return KernelGates("hc", list(self.projection_ICD.unsqueeze(2).unbind(0)), parameters)

    def cost(self) -> Cost:
        n = self.num_streams
        logits = n * (2 + 2 * (n + 2)) if self.dynamic else 0
        return streams_cost(self.num_branches, n, 2 * n + 2 * n * (n + 1) + logits)
