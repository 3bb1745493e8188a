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
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from darlit.errors import DarlitError
from darlit.ops import reference
from darlit.ops.dispatch import IMPLEMENTATIONS
from darlit.pathways.blocks import Blocks, BlockState
from darlit.pathways.contract import (
    BRANCHES_PER_LAYER,
    Pathway,
    PathwayOptions,
    Probe,
    Streams,
    check_option,
    observe,
)
from darlit.pathways.cost import Cost, history_cost
from darlit.pathways.depth_history import DepthHistory, Source, new_queries, reset_queries


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
class DualAttentionOptions(PathwayOptions):
    """Options of Dual Attention Residuals.

    Args:
        block_size: K layers of a block; 1 = Full DAR. The last block takes the remainder.
        route: which stream serves keys and values: dar, or an ablation.
        include_partial: whether the block under way is a source.
        carry_partial: whether a block starts from the last entry instead of empty [ours].
        gates: static, a scalar per branch, or dynamic, a scalar and a projection per token [ours].
        beta_asymmetry: a in beta = 1 +- a at the start; 0 leaves the two streams equal for ever [ours].
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
    """``sigmoid(scalar_i + <projection_i, RMSNorm(x)>)`` for the branches that have this gate.

    The projection exists for dynamic gates only and starts at zero, so both kinds start equal.
    """

    def __init__(self, branches: list[int], outputs: int, width: int, dynamic: bool, norm_eps: float) -> None:
        super().__init__()
        self.slot = {branch: slot for slot, branch in enumerate(branches)}
        self.norm_eps = norm_eps
        self.logit_GO = nn.Parameter(torch.empty(len(branches), outputs))
        self.projection_GOD = nn.Parameter(torch.empty(len(branches), outputs, width)) if dynamic else None

    def reset_parameters(self, logit_GO: Tensor) -> None:
        with torch.no_grad():
            self.logit_GO.copy_(logit_GO.expand_as(self.logit_GO))
        if self.projection_GOD is not None:
            nn.init.zeros_(self.projection_GOD)

    def forward(self, branch: int, streams: Streams) -> Tensor:
        """``[O]``, of a dynamic gate ``[B, T, O]`` from the mean of the streams; in the dtype of statistics."""
        slot = self.slot[branch]
        logit = reference.wide(self.logit_GO[slot])
        if self.projection_GOD is not None:
            # Computed again in the backward pass instead of keeping a wide copy of the mean.
            logit = logit + checkpoint(
                _mean_logits,
                streams,
                self.projection_GOD[slot],
                self.norm_eps,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return logit.sigmoid()


def _mean_logits(streams: Streams, rows_OD: Tensor, eps: float) -> Tensor:
    mean_BTD = torch.stack([reference.wide(stream_BTD) for stream_BTD in streams]).mean(0)
    return reference.depth_logits(mean_BTD, rows_OD, eps)


@dataclass(kw_only=True)
class DualAttentionState(BlockState):
    input: Streams = ()
    """What the branch read; dynamic write gates look at it."""

    def _read(self, read: int) -> Tensor:
        pathway = self.pathway
        partial = self.partial if pathway.options.include_partial else None
        alpha = self._alpha(read, partial)
        x_BTD = self.history.read(read, (alpha, 1 - alpha), partial)
        if pathway.dynamic:
            self.input = (x_BTD,)
        return x_BTD

    def _alpha(self, read: int, partial: Source | None) -> Tensor | float:
        pathway = self.pathway
        if read < pathway.first_choice:
            return 0.5
        newest = self.history.sources[-1] if partial is None else partial
        alpha = pathway.alpha(read, newest.streams)
        self._show("alpha", read, alpha)
        return alpha[..., 0] if pathway.dynamic else alpha

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        pathway = self.pathway
        beta = 2 * pathway.beta(branch, self.input)
        self._show("beta", branch, beta)
        carried, rho = self._carried(), None
        if carried is not None and branch in pathway.rho.slot:
            rho = pathway.rho(branch, self.input)
            self._show("rho", branch, rho)
        next_read = branch + 1
        if pathway.blocks.ends(branch):
            entry = self.history.write(carried, output_BTD, rho=rho, beta=beta, first_read=next_read)
            self._complete(branch, entry)
        else:
            last_read = next_read if pathway.options.include_partial else branch
            self.partial = self.history.write(
                carried, output_BTD, rho=rho, beta=beta, first_read=next_read, last_read=last_read
            )

    def _carried(self) -> Streams | None:
        """The streams that a write adds to, or None where the block starts empty."""
        if self.partial is not None:
            return self.partial.streams
        return self.history.sources[-1].streams if self.pathway.options.carry_partial else None

    def _show(self, name: str, branch: int, value: Tensor) -> None:
        if self.probe is not None:
            self.probe.gate(name, branch, value)


class DualAttention(Pathway):
    """Two streams. State kept: 2 (R + 1) entries of R blocks, and for each the logits of the reads to come.

    Parameters: two queries of D per read that has a choice; per branch one alpha, two betas and, where the streams
    can differ, one rho; with dynamic gates a projection of D for each of these.
    """

    name = "dar"
    title = "Dual Attention Residuals"
    source = "arXiv 2607.18730"
    keeps = "both streams of every source"
    Options = DualAttentionOptions
    implementations = IMPLEMENTATIONS

    def __init__(self, num_branches: int, width: int, options: DualAttentionOptions, norm_eps: float) -> None:
        super().__init__(num_branches, width, options, norm_eps)
        check_option("block_size", options.block_size, options.block_size <= self.num_layers, f"1 to {self.num_layers}")
        self.blocks = Blocks(num_branches, size=BRANCHES_PER_LAYER * options.block_size)
        self.dynamic = options.gates == "dynamic"
        # Before these reads there is one source only, the embedding: no query, no alpha.
        self.first_choice = 1 if options.include_partial else min(self.blocks.size, num_branches)
        choices = list(range(self.first_choice, num_branches + 1))
        branches = list(range(num_branches))
        # rho exists where streams that can differ are carried on: not into an empty partial, not from the embedding.
        carrying = [i for i in branches[1:] if options.carry_partial or i % self.blocks.size != 0]

        self.queries_JRD = new_queries(2, len(choices), width)
        self.alpha = Gate(choices, 1, width, self.dynamic, norm_eps)
        self.beta = Gate(branches, 2, width, self.dynamic, norm_eps)
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
        route = ROUTES[self.options.route]
        reads = history_cost(
            self.num_branches,
            self.first_choice,
            ends_block=self.blocks.ends,
            partial_is_source=self.options.include_partial,
            key_streams=route.key_streams,
            value_streams=route.value_streams,
        )
        # A write into an empty block takes the output and gives two partials, a product each; one that carries takes
        # two partials more, exchanges them (four flops) and adds.
        empty = 0 if self.options.carry_partial else reads.entries - 1
        carrying = self.num_branches - empty
        # Dynamic gates: one feature norm per read for alpha and one for beta and rho, and their projections.
        outputs = sum(gate.logit_GO.numel() for gate in (self.alpha, self.beta, self.rho))
        gates = (4 + 1) * len(self.alpha.slot) + 3 * self.num_branches + 2 * outputs if self.dynamic else 0
        return Cost(
            kept=2 * reads.entries,
            moved=reads.moved + 3 * empty + 5 * carrying,
            flops=reads.flops + 2 * empty + 8 * carrying + gates,
        )

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> DualAttentionState:
        route = ROUTES[self.options.route]
        history = DepthHistory(
            queries_JRD=self.queries_JRD,
            key_streams=route.key_streams,
            value_streams=route.value_streams,
            first_choice=self.first_choice,
            norm_eps=self.norm_eps,
            implementation=self.implementation_for(embedding_BTD, probe),
            probe=probe,
        )
        history = history.append(history.source(observe(probe, 0, (embedding_BTD, embedding_BTD)), first_read=0))
        return DualAttentionState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, history=history)
