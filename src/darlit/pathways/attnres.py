"""Attention Residuals (AttnRes, arXiv 2603.15031): every branch reads a softmax mixture of earlier outputs.

    v_0 = embedding,  v_i = f_i(x_i),  k = RMSNorm(v)
    x_l = sum_{i<l} softmax_i(<w_l, k_i>) v_i            replaces the running sum

Full: every branch output is a source. Block: a source is the sum of the outputs of a block of K layers, and inside
a block its running sum, if not empty, is one more. A final read over all sources feeds the head.

``num_queries`` reads are averaged; ``sep_v`` projects the values: v_i becomes W_i v_i in the sum, the key stays
RMSNorm(v_i), one matrix W_i per source. In Block form a block's running sum has its block's matrix.

At initialisation the queries are zero and a read is the mean of its sources, ``residual sum / S``. The branch's
RMSNorm divides the scale out again up to its eps: relative difference to the standard residual at most
``eps (S^2 - 1) / (2 mean(x^2))`` per norm, with x the residual sum. With ``sep_v`` the same: every W_i is the identity.
Not so with ``query_init_std > 0``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darlit.errors import DarlitError
from darlit.ops.dispatch import IMPLEMENTATIONS
from darlit.pathways.contract import (
    BRANCHES_PER_LAYER,
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


@dataclass(frozen=True)
class AttnResOptions(PathwayOptions):
    """Options of Attention Residuals.

    Args:
        block_size: K layers of a block; 0 = full, every branch output is a source.
        num_queries: independent reads of a branch, averaged [ours]: the control for DAR's two queries.
        sep_v: values go through a projection of their own, identity at the start, one per source [ours].
        query_init_std: 0 = zero queries; several queries must start apart, or they always stay equal.
    """

    block_size: int = 0
    num_queries: int = 1
    sep_v: bool = False
    query_init_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("block_size", self.block_size, self.block_size >= 0, "0 (full) or the layers of a block, 1 to L")
        check_option("num_queries", self.num_queries, self.num_queries >= 1, "at least 1")
        check_option("query_init_std", self.query_init_std, self.query_init_std >= 0, "at least 0")
        if self.num_queries > 1 and self.query_init_std == 0:
            raise DarlitError(
                f"num_queries={self.num_queries} with query_init_std=0.0 is not allowed; equal queries never "
                "separate: set query_init_std, for example 0.02"
            )


@dataclass(kw_only=True)
class AttnResState(PathwayState):
    history: History
    shares: Tensor
    """``[J]``: how much of a read each query contributes."""

    @property
    def implementation(self) -> str:
        return self.history.implementation

    def fork(self) -> AttnResState:
        return replace(self, history=self.history.fork())

    def _read(self, read: int) -> Tensor:
        return self.history.read(read, self.shares)

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        running = self.history.carried
        # The last stream is the running sum itself, with or without sep_v.
        value_BTD = running[-1] + output_BTD if running else output_BTD
        entry = self.history.num_entries
        if self.pathway.layout.blocks.ends(branch):
            (value_BTD,) = observe(self.probe, entry, (value_BTD,))
        self.history.put(branch, self.pathway.source_streams(entry, value_BTD))

    def _finish(self) -> Tensor:
        return self._read(self.pathway.num_branches)


class AttnRes(Pathway):
    """One stream. State kept: every source, and for each the logits of the reads to come.

    Parameters: one query per read that has a choice, `num_queries` times D each; with `sep_v` D^2 per source.
    """

    name = "attnres"
    title = "Attention Residuals"
    source = "arXiv 2603.15031"
    keeps = "every source"
    Options = AttnResOptions
    implementations = IMPLEMENTATIONS

    def __init__(self, num_branches: int, width: int, options: AttnResOptions, norm_eps: float) -> None:
        super().__init__(num_branches, width, options, norm_eps)
        check_option("block_size", options.block_size, options.block_size <= self.num_layers, f"0 to {self.num_layers}")
        self.layout = Layout(
            key_streams=(1 if options.sep_v else 0,) * options.num_queries,
            value_streams=(0,) * options.num_queries,
            blocks=Blocks(num_branches, size=BRANCHES_PER_LAYER * options.block_size or 1),
        )
        # Read 0 sees the embedding alone; from read 1 on there is a choice.
        self.queries_JRD = new_queries(options.num_queries, num_branches, width)
        if options.sep_v:
            num_entries = 1 + sum(map(self.layout.blocks.ends, range(num_branches)))
            self.value_projection_EDD = nn.Parameter(torch.empty(num_entries, width, width))
        self.reset_parameters()

    @property
    def period(self) -> int:
        return self.options.block_size or 1

    def reset_parameters(self) -> None:
        reset_queries(self.queries_JRD, self.options.query_init_std)
        if self.options.sep_v:
            with torch.no_grad():
                self.value_projection_EDD.copy_(torch.eye(self.width).expand_as(self.value_projection_EDD))

    def source_streams(self, entry: int, value_BTD: Tensor) -> Streams:
        """What a read takes of a source: its value, and with ``sep_v`` the tensor that its key comes from beside it."""
        if not self.options.sep_v:
            return (value_BTD,)
        projected_BTD = F.linear(value_BTD, self.value_projection_EDD[entry].to(value_BTD.dtype))
        return projected_BTD.to(value_BTD.dtype), value_BTD

    def cost(self) -> Cost:
        cost = history_cost(self.layout, streams=1, gated=False)
        if not self.options.sep_v:
            return cost
        # A projection per entry and per read of a running sum: the source in, its value out.
        projections = self.num_branches + 1
        moved, flops = cost.moved + 2 * projections, cost.flops + 2 * self.width * projections
        return Cost(2 * cost.kept, moved, flops)

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> AttnResState:
        self.check_embedding(embedding_BTD)
        (entry_BTD,) = observe(probe, 0, (embedding_BTD,))
        streams = self.source_streams(0, entry_BTD)
        history = start_history(self, self.layout, self.queries_JRD, streams, probe)
        targets = self.options.num_queries
        dtype = torch.promote_types(embedding_BTD.dtype, torch.float32)
        shares = torch.full((targets,), 1 / targets, dtype=dtype, device=embedding_BTD.device)
        return AttnResState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, history=history, shares=shares)
