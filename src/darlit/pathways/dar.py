"""Dual Attention Residuals (DAR, arXiv 2607.18730): two streams that select depths for each other.

Read, before branch i, for each stream j (``dar`` route):

    k^j_r = RMSNorm(H^{1-j}_r)       keys from the opposite stream
    a^j   = softmax_r <w^j_i, k^j_r>
    h^j   = sum_r a^j_r H^j_r        values from the own stream, not normalised
    x_i   = alpha_i h^0 + (1 - alpha_i) h^1

Write, after branch i with output y_i:

    P^j <- rho_i P^j + (1 - rho_i) P^{1-j} + beta^j_i y_i        an empty partial: P^j <- beta^j_i y_i
    after the last branch of a block of K layers: append P to the history, empty P

K = 1 is Full DAR, K > 1 Block DAR. The transport [[rho, 1-rho], [1-rho, rho]] is doubly stochastic as it stands.
What the paper's summary leaves open is an option marked [ours] and listed in docs/pathways.md.

At initialisation (zero queries, alpha 1/2, beta^0 + beta^1 = 2) a read is ``residual sum / S`` for the routes dar,
self_kv and cross_v: transport keeps the sum of the streams. The logits then equal the standard residual's up to the
norm's eps, relative difference at most ``eps (S^2 - 1) / (2 mean(x^2))`` per norm with x the residual sum. Not so with
``fixed_kv`` (both reads take stream 1 and need queries that differ), ``carry_partial`` (entries are running states),
``include_partial=False`` (a branch does not see its block) or ``query_init_std > 0``.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from darlit.errors import DarlitError
from darlit.ops import reference
from darlit.ops.dispatch import IMPLEMENTATIONS
from darlit.pathways.contract import (
    BRANCHES_PER_LAYER,
    OncePerPass,
    Pathway,
    PathwayOptions,
    PathwayState,
    Probe,
    Streams,
    check_option,
    observe,
)
from darlit.pathways.cost import Cost, history_cost
from darlit.pathways.history import Blocks, History, Layout, new_queries, reset_queries, start_history


class Route(NamedTuple):
    """Per target stream, which stream serves its keys and which its values."""

    key_streams: tuple[int, int]
    value_streams: tuple[int, int]


ROUTES = {
    "dar": Route(key_streams=(1, 0), value_streams=(0, 1)),
    "self_kv": Route(key_streams=(0, 1), value_streams=(0, 1)),
    "cross_v": Route(key_streams=(0, 1), value_streams=(1, 0)),
    "fixed_kv": Route(key_streams=(0, 0), value_streams=(1, 1)),
}


@dataclass(frozen=True)
class DarOptions(PathwayOptions):
    """Options of Dual Attention Residuals.

    Args:
        block_size: K layers of a block; 1 = Full DAR. The last block takes the remainder.
        route: which stream serves keys and values: dar, or an ablation.
        include_partial: whether the block that is being written is a source.
        carry_partial: whether a block starts from the last entry instead of empty [ours].
        gates: static, a scalar per branch, or dynamic, a scalar and a projection per token [ours].
        beta_asymmetry: a in beta = 1 +- a at the start; 0 leaves the two streams equal at every step [ours].
        beta_pattern: stream 0 gets 1 + a in every branch (layer), or in attention branches only and 1 - a in
            feed-forward branches (branch) [ours].
        rho_logit: rho = sigmoid(rho_logit) at the start [ours].
        query_init_std: 0 = zero queries, every read starts as the mean of its sources [ours]; fixed_kv needs more.
    """

    block_size: int = 1
    route: Literal["dar", "self_kv", "cross_v", "fixed_kv"] = "dar"
    include_partial: bool = True
    carry_partial: bool = False
    gates: Literal["static", "dynamic"] = "static"
    beta_asymmetry: float = 0.25
    beta_pattern: Literal["layer", "branch"] = "branch"
    rho_logit: float = 3.0
    query_init_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("block_size", self.block_size, self.block_size >= 1, "the layers of a block, 1 (full) to L")
        check_option("beta_asymmetry", self.beta_asymmetry, 0 <= self.beta_asymmetry < 1, "at least 0 and below 1")
        check_option("query_init_std", self.query_init_std, self.query_init_std >= 0, "at least 0")
        # Little further out, sigmoid rounds to 0 or 1 in float32, where rho has no gradient any more.
        check_option("rho_logit", self.rho_logit, abs(self.rho_logit) <= 16, "between -16 and 16")
        if self.route == "fixed_kv" and self.query_init_std == 0:
            raise DarlitError(
                "route='fixed_kv' with query_init_std=0.0 is not allowed; both reads take the same keys and values, so "
                "equal queries never separate and alpha never matters: set query_init_std, for example 0.02"
            )
        if not self.include_partial and self.block_size == 1:
            warnings.warn(
                "include_partial=False with block_size=1 hides a layer's attention output from its own feed-forward",
                stacklevel=3,
            )


class Gate(nn.Module):
    """``scale sigmoid(scalar_i + <projection_i, RMSNorm(mean of the streams)>)`` for the branches that have this gate.

    The projection exists for dynamic gates only and starts at zero, so both kinds start equal. With ``complement``
    there is one output, and 1 - value is returned beside it.
    """

    def __init__(
        self,
        branches: list[int],
        outputs: int,
        width: int,
        dynamic: bool,
        norm_eps: float,
        scale: float = 1.0,
        complement: bool = False,
    ) -> None:
        super().__init__()
        self.scale, self.complement = scale, complement
        self.slot = {branch: slot for slot, branch in enumerate(branches)}
        self.norm_eps = norm_eps
        self.logit_GO = nn.Parameter(torch.empty(len(branches), outputs))
        self.projection_GOD = nn.Parameter(torch.empty(len(branches), outputs, width)) if dynamic else None

    def reset_parameters(self, logit_GO: Tensor) -> None:
        with torch.no_grad():
            self.logit_GO.copy_(logit_GO.expand_as(self.logit_GO))
        if self.projection_GOD is not None:
            nn.init.zeros_(self.projection_GOD)

    def rows(self) -> tuple[Tensor, ...]:
        """Per branch, ``[O]``: the values of static gates, all made at once, or the scalar logits of dynamic ones."""
        logit_GO = reference.upcast(self.logit_GO)
        return (logit_GO if self.projection_GOD is not None else self._value(logit_GO)).unbind(0)

    def forward(self, row: Tensor, branch: int, streams: Streams) -> Tensor:
        """The value ``[O]`` of a static gate, or ``[B, T, O]`` of a dynamic one; ``row`` is the branch's of `rows`."""
        if self.projection_GOD is None:
            return row
        # Computed again in the backward pass instead of keeping an upcast copy of the mean.
        logit_BTO = checkpoint(
            _mean_logits,
            streams,
            self.projection_GOD[self.slot[branch]],
            self.norm_eps,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return self._value(row + logit_BTO)

    def _value(self, logit: Tensor) -> Tensor:
        if self.complement:
            logit = torch.cat([logit, -logit], dim=-1)
        value = logit.sigmoid()
        return value if self.scale == 1 else self.scale * value


def _mean_logits(streams: Streams, rows_OD: Tensor, eps: float) -> Tensor:
    mean_BTD = torch.stack([reference.upcast(stream_BTD) for stream_BTD in streams]).mean(0)
    return reference.depth_logits(mean_BTD, rows_OD, eps)


@dataclass(kw_only=True)
class DarState(PathwayState):
    history: History
    gates: OncePerPass[dict[str, tuple[Tensor, ...]]]
    """`Gate.rows` by name."""
    input: Streams = ()
    """What the branch read; dynamic write gates look at it."""

    @property
    def implementation(self) -> str:
        return self.history.implementation

    def fork(self) -> DarState:
        return replace(self, history=self.history.fork())

    def _read(self, read: int) -> Tensor:
        shares: Any = None
        if read >= self.pathway.layout.first_choice:
            shares = self._gate("alpha", read, self.history.newest)  # alpha, 1 - alpha
            self._show("alpha", read, shares[..., :1])
        x_BTD = self.history.read(read, shares)
        if self.pathway.dynamic:
            self.input = (x_BTD,)
        return x_BTD

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        beta, rho = self._gate("beta", branch, self.input), None
        self._show("beta", branch, beta)
        if self.history.carried and branch in self.pathway.rho.slot:
            rho = self._gate("rho", branch, self.input)
            self._show("rho", branch, rho)
        self.history.write(branch, output_BTD, beta, rho)

    def _finish(self) -> Tensor:
        return self._read(self.pathway.num_branches)

    def _gate(self, name: str, branch: int, streams: Streams) -> Tensor:
        gate = getattr(self.pathway, name)
        return gate(self.gates.get()[name][gate.slot[branch]], branch, streams)

    def _show(self, name: str, branch: int, value: Tensor) -> None:
        if self.probe is not None:
            self.probe.gate(name, branch, value)


class Dar(Pathway):
    """Two streams. State kept: 2 (R + 1) entries of R blocks, and for each the logits of the reads to come.

    Parameters: two queries of D per read that has a choice; per branch one alpha, two betas and, where the streams
    can differ, one rho; with dynamic gates a projection of D for each of these.
    """

    name = "dar"
    title = "Dual Attention Residuals"
    source = "arXiv 2607.18730"
    keeps = "both streams of every source"
    Options = DarOptions
    implementations = IMPLEMENTATIONS

    def __init__(self, num_branches: int, width: int, options: DarOptions, norm_eps: float) -> None:
        super().__init__(num_branches, width, options, norm_eps)
        check_option("block_size", options.block_size, options.block_size <= self.num_layers, f"1 to {self.num_layers}")
        blocks = Blocks(num_branches, size=BRANCHES_PER_LAYER * options.block_size)
        self.dynamic = options.gates == "dynamic"
        self.layout = Layout(
            *ROUTES[options.route],
            blocks=blocks,
            # Before this read there is one source only, the embedding: no query, no alpha.
            first_choice=1 if options.include_partial else min(blocks.size, num_branches),
            include_partial=options.include_partial,
            carry_partial=options.carry_partial,
        )
        choices = list(range(self.layout.first_choice, num_branches + 1))
        branches = list(range(num_branches))
        # rho exists where streams that can differ are carried on: not into an empty partial, not from the embedding.
        carrying = [i for i in branches[1:] if options.carry_partial or i % blocks.size != 0]

        self.queries_JRD = new_queries(2, len(choices), width)
        self.alpha = Gate(choices, 1, width, self.dynamic, norm_eps, complement=True)
        self.beta = Gate(branches, 2, width, self.dynamic, norm_eps, scale=2)
        self.rho = Gate(carrying, 1, width, self.dynamic, norm_eps)
        self.reset_parameters()

    @property
    def period(self) -> int:
        return self.options.block_size

    def reset_parameters(self) -> None:
        reset_queries(self.queries_JRD, self.options.query_init_std)
        self.alpha.reset_parameters(torch.tensor(0.0))
        self.rho.reset_parameters(torch.tensor(float(self.options.rho_logit)))
        self.beta.reset_parameters(self._beta_logits())

    def _beta_logits(self) -> Tensor:
        """Logits ``[branches, 2]`` with ``2 sigmoid = 1 +- asymmetry``, signed by the pattern."""
        asymmetry = self.options.beta_asymmetry
        size = math.log((1 + asymmetry) / (1 - asymmetry))
        branch_sign = -1 if self.options.beta_pattern == "branch" else 1
        signs = torch.tensor([float(branch_sign ** (branch % 2)) for branch in range(self.num_branches)])
        return size * torch.stack([signs, -signs], dim=-1)

    def cost(self) -> Cost:
        cost = history_cost(self.layout, streams=2, gated=True)
        if not self.dynamic:
            return cost
        # One feature norm per read for alpha and one for beta and rho, and their projections.
        outputs = sum(gate.logit_GO.numel() for gate in (self.alpha, self.beta, self.rho))
        return replace(cost, flops=cost.flops + 5 * len(self.alpha.slot) + 3 * self.num_branches + 2 * outputs)

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> DarState:
        self.check_embedding(embedding_BTD)
        streams = observe(probe, 0, (embedding_BTD, embedding_BTD))
        history = start_history(self, self.layout, self.queries_JRD, streams, probe)
        gates = OncePerPass(lambda: {name: getattr(self, name).rows() for name in ("alpha", "beta", "rho")})
        return DarState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, history=history, gates=gates)
