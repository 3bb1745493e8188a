"""Manifold-constrained Hyper-Connections (mHC, arXiv 2512.24880): streams are exchanged by doubly stochastic matrices.

    x'     = RMSNorm(vec(X))                                   all n D channels at once, no gain [ours]
    H_pre  = sigmoid(alpha_pre x' phi_pre + b_pre)             1 x n
    H_post = 2 sigmoid(alpha_post x' phi_post + b_post)        1 x n
    H_res  = Sinkhorn(exp(alpha_res mat(x' phi_res) + b_res))  n x n
    X      <- H_res X + H_post^T f(H_pre X)                    output stream o is sum_i H_res[o, i] X_i

Sinkhorn divides by column sums, then by row sums, 20 times. For n = 2 the limit has a closed form: with logits
[[a, b], [c, d]] it is [[rho, 1 - rho], [1 - rho, rho]] and rho = sigmoid((a + d - b - c) / 2). Streams start as n
copies of the embedding and are summed at the end.

H_res has parameters for the branches between the first and the last only: the first sees n equal streams, and the sum
after the last is the same for every doubly stochastic matrix.

At initialisation phi = 0 [ours], H_post = 1, and the entries of H_pre sum to one: branch i reads `read_share` of
stream ``i mod n`` and equal parts of the rest [ours]; equal shares of all would never let the streams differ. Every
stream is the residual sum up to rounding, for any H_res, and so is what a branch reads. The sum of the streams is n
times the residual sum: relative difference to the standard residual at the final norm at most
``eps (1 - 1 / n^2) / (2 mean(x^2))`` with x the residual sum. (n = 1: a branch reads read_share times the stream, the
difference is at most ``eps (1 / read_share^2 - 1) / (2 mean(x^2))`` per norm.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from darlit.ops import reference
from darlit.ops.dispatch import IMPLEMENTATIONS
from darlit.ops.reference import doubly_stochastic
from darlit.pathways.contract import PathwayOptions, Streams, check_option
from darlit.pathways.cost import Cost, streams_cost
from darlit.pathways.streams import KernelGates, Mixing, WidenedStreams


@dataclass(frozen=True)
class MHCOptions(PathwayOptions):
    """Options of manifold-constrained Hyper-Connections.

    Args:
        num_streams: n.
        read_share: how much of what branch i reads comes from stream i mod n at the start [ours].
        res_logit: b_res at the start is res_logit times the identity: near the identity for large values [ours].
        dynamic_scale: alpha_pre, alpha_post and alpha_res at the start.
    """

    num_streams: int = 4
    read_share: float = 0.75
    res_logit: float = 4.0
    dynamic_scale: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("num_streams", self.num_streams, self.num_streams >= 1, "at least 1")
        check_option("read_share", self.read_share, 0 < self.read_share < 1, "above 0 and below 1")
        check_option("dynamic_scale", self.dynamic_scale, self.dynamic_scale > 0, "above 0")
        # Further out, float32 loses what is off the diagonal, and with it the gradient.
        check_option("res_logit", self.res_logit, abs(self.res_logit) <= 16, "between -16 and 16")


class MHC(WidenedStreams):
    """n streams. State kept: the n streams.

    Parameters per branch: 2 n scalars, 2 n^2 D and two scales; for H_res, where it matters, n^2 + n^3 D and one scale.
    """

    name = "mhc"
    title = "Manifold-constrained Hyper-Connections"
    source = "arXiv 2512.24880"
    keeps = "the streams"
    Options = MHCOptions
    implementations = IMPLEMENTATIONS

    def __init__(self, num_branches: int, width: int, options: MHCOptions, norm_eps: float) -> None:
        super().__init__(num_branches, width, options, norm_eps)
        n = options.num_streams
        mixing = range(1, num_branches - 1) if n > 1 else range(0)
        self.res_slot = {branch: slot for slot, branch in enumerate(mixing)}
        self.pre_bias_IN = nn.Parameter(torch.empty(num_branches, n))
        self.pre_scale_I = nn.Parameter(torch.empty(num_branches))
        self.post_bias_IN = nn.Parameter(torch.empty(num_branches, n))
        self.post_scale_I = nn.Parameter(torch.empty(num_branches))
        self.res_bias_INN = nn.Parameter(torch.empty(len(mixing), n, n))
        self.res_scale_I = nn.Parameter(torch.empty(len(mixing)))
        # phi of a branch, transposed: rows for the n logits of pre, the n of post and the n^2 of res, where it has one.
        self.projections_CND = nn.ParameterList(
            torch.empty(2 * n + n * n * (branch in self.res_slot), n, width) for branch in range(num_branches)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        n, share = self.num_streams, self.options.read_share
        own = torch.eye(n, dtype=torch.double)[torch.arange(self.num_branches) % n]
        shares_IN = own * share + (1 - own) * (1 - share) / max(n - 1, 1)
        with torch.no_grad():
            self.pre_bias_IN.copy_(torch.logit(shares_IN))
            self.post_bias_IN.zero_()
            self.res_bias_INN.copy_((self.options.res_logit * torch.eye(n)).expand_as(self.res_bias_INN))
            for scale_I in (self.pre_scale_I, self.post_scale_I, self.res_scale_I):
                scale_I.fill_(self.options.dynamic_scale)
            for rows_CND in self.projections_CND:
                rows_CND.zero_()

    def mixing(self, branch: int, streams: Streams) -> Mixing:
        logits, _ = reference.vector_logits(streams, self.projections_CND[branch], self.norm_eps)  # x' phi, [B, T, C]
        n, slot, upcast = self.num_streams, self.res_slot.get(branch), reference.upcast
        pre = upcast(self.pre_scale_I[branch]) * logits[..., :n] + upcast(self.pre_bias_IN[branch])
        post = upcast(self.post_scale_I[branch]) * logits[..., n : 2 * n] + upcast(self.post_bias_IN[branch])
        if slot is None:
            return Mixing(pre.sigmoid(), 2 * post.sigmoid(), None)
        res = upcast(self.res_scale_I[slot]) * logits[..., 2 * n :].unflatten(-1, (n, n)) + upcast(
            self.res_bias_INN[slot]
        )
        return Mixing(pre.sigmoid(), 2 * post.sigmoid(), doubly_stochastic(res))

    def kernel_gates(self) -> KernelGates:
        biases, scales = (self.pre_bias_IN, self.post_bias_IN), (self.pre_scale_I, self.post_scale_I)
        rows = list(torch.cat([*biases, *(scale_I[:, None] for scale_I in scales)], dim=1).unbind(0))
        if self.res_slot:
            inner = slice(1, self.num_branches - 1)
            columns = [*(bias_IN[inner] for bias_IN in biases), self.res_bias_INN.flatten(1)]
            columns += [*(scale_I[inner, None] for scale_I in scales), self.res_scale_I[:, None]]
            rows[inner] = torch.cat(columns, dim=1).unbind(0)
        return KernelGates("mhc", list(self.projections_CND), tuple(rows))

    def cost(self) -> Cost:
        n, exchanges = self.num_streams, len(self.res_slot)
        return streams_cost(self.num_branches, n, 4 * n + 2 * n + 4 * n * n, exchanges * (2 * n * n + 2 * n * n * n))
