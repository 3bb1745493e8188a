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

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darlit.errors import DarlitError
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


@dataclass(frozen=True)
class AttentionOptions(PathwayOptions):
    """Options of Attention Residuals.

    Args:
        block_size: K layers of a block; 0 = full, every branch output is a source.
        num_queries: independent reads of a branch, averaged [ours]: the control for DAR's two queries.
        sep_v: values go through a projection of their own, identity at the start, one per source [ours].
        query_init_std: 0 = zero queries; several queries must start apart, or they stay equal for ever.
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
class AttentionState(BlockState):
    """``partial`` is the block's running sum; its last stream is the sum itself, with or without ``sep_v``."""

    def _read(self, read: int) -> Tensor:
        targets = self.pathway.options.num_queries
        return self.history.read(read, [1.0 / targets] * targets, self.partial)

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        value_BTD = output_BTD if self.partial is None else self.partial.streams[-1] + output_BTD
        if self.pathway.blocks.ends(branch):
            (value_BTD,) = observe(self.probe, len(self.history.sources), (value_BTD,))
            self._complete(branch, self._source(value_BTD, first_read=branch + 1))
        else:
            self.partial = self._source(value_BTD, first_read=branch + 1, last_read=branch + 1)

    def _source(self, value_BTD: Tensor, first_read: int, last_read: int | None = None) -> Source:
        """What the history keeps of the entry that is next to complete."""
        streams = self.pathway.source_streams(len(self.history.sources), value_BTD)
        return self.history.source(streams, first_read, last_read)


class AttentionResiduals(Pathway):
    """One stream. State kept: every source, and for each the logits of the reads to come.

    Parameters: one query per read that has a choice, `num_queries` times D each; with `sep_v` D^2 per source.
    """

    name = "attnres"
    title = "Attention Residuals"
    source = "arXiv 2603.15031"
    keeps = "every source"
    Options = AttentionOptions
    implementations = IMPLEMENTATIONS

    def __init__(self, num_branches: int, width: int, options: AttentionOptions, norm_eps: float) -> None:
        super().__init__(num_branches, width, options, norm_eps)
        check_option("block_size", options.block_size, options.block_size <= self.num_layers, f"0 to {self.num_layers}")
        self.blocks = Blocks(num_branches, size=BRANCHES_PER_LAYER * options.block_size or 1)
        # Read 0 sees the embedding alone; from read 1 on there is a choice.
        self.queries_JRD = new_queries(options.num_queries, num_branches, width)
        if options.sep_v:
            num_entries = 1 + sum(self.blocks.ends(branch) for branch in range(num_branches))
            self.value_projection_EDD = nn.Parameter(torch.empty(num_entries, width, width))
        self.reset_parameters()

    @property
    def period(self) -> int:
        return self.options.block_size or 1

    @property
    def key_streams(self) -> tuple[int, ...]:
        return (1 if self.options.sep_v else 0,) * self.options.num_queries

    @property
    def value_streams(self) -> tuple[int, ...]:
        return (0,) * self.options.num_queries

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
        reads = history_cost(
            self.num_branches,
            first_choice=1,
            ends_block=self.blocks.ends,
            partial_is_source=True,
            key_streams=self.key_streams,
            value_streams=self.value_streams,
        )
        # Adding to a running sum takes two vectors and gives one; an output that is a source by itself is only read.
        sums = self.num_branches - (reads.entries - 1)
        kept, moved, flops = reads.entries, reads.moved + 3 * sums + (reads.entries - 1), reads.flops + sums
        if self.options.sep_v:
            # A projection per entry and per read of a running sum: the source in, its value out.
            projections = reads.entries + sums
            kept, moved, flops = 2 * kept, moved + 2 * projections, flops + 2 * self.width * projections
        return Cost(kept, moved, flops)

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> AttentionState:
        history = DepthHistory(
            queries_JRD=self.queries_JRD,
            key_streams=self.key_streams,
            value_streams=self.value_streams,
            first_choice=1,
            norm_eps=self.norm_eps,
            implementation=self.implementation_for(embedding_BTD, probe),
            probe=probe,
        )
        (entry_BTD,) = observe(probe, 0, (embedding_BTD,))
        history = history.append(history.source(self.source_streams(0, entry_BTD), first_read=0))
        return AttentionState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, history=history)
