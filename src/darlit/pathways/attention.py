"""Attention Residuals (AttnRes, arXiv 2603.15031): every branch reads a softmax mixture of earlier outputs.

    v_0 = embedding,  v_i = f_i(x_i),  k = RMSNorm(v)
    x_l = sum_{i<l} softmax_i(<w_l, k_i>) v_i            replaces the running sum

Full: every branch output is a source. Block: a source is the sum of the outputs of a block of K layers, and inside
a block its running sum, if not empty, is one more. A final read over all sources feeds the head.

At initialisation the queries are zero and a read is the mean of its sources, ``residual sum / S``. The branch's
RMSNorm divides the scale out again up to its eps: relative difference to the standard residual at most
``eps (S^2 - 1) / (2 mean(x^2))`` per norm, with x the residual sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from darlit.pathways.contract import (
    BRANCHES_PER_LAYER,
    Pathway,
    PathwayOptions,
    PathwayState,
    Probe,
    check_option,
    observe,
)
from darlit.pathways.depth_history import DepthHistory, new_queries, reset_queries


@dataclass(frozen=True)
class AttentionOptions(PathwayOptions):
    """Options of Attention Residuals.

    Args:
        block_size: K layers of a block; 0 = full, every branch output is a source.
        num_queries: independent reads of a branch, averaged [ours]: the control for DAR's two queries.
        query_init_std: 0 = zero queries; several queries must start apart, or they stay equal for ever.
    """

    block_size: int = 0
    num_queries: int = 1
    query_init_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("block_size", self.block_size, self.block_size >= 0, "0 (full) or the layers of a block, 1 to L")
        check_option("num_queries", self.num_queries, self.num_queries >= 1, "at least 1")
        check_option("query_init_std", self.query_init_std, self.query_init_std >= 0, "at least 0")
        if self.num_queries > 1 and self.query_init_std == 0:
            raise ValueError(
                f"num_queries={self.num_queries} with query_init_std=0.0 is not allowed; equal queries never "
                "separate: set query_init_std, for example 0.02"
            )


@dataclass(kw_only=True)
class AttentionState(PathwayState):
    history: DepthHistory
    partial_BTD: Tensor | None = None

    def _read(self, read: int) -> Tensor:
        targets = self.pathway.options.num_queries
        partial = None if self.partial_BTD is None else (self.partial_BTD,)
        return self.history.read(read, [1.0 / targets] * targets, partial, self.probe)

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        self.partial_BTD = output_BTD if self.partial_BTD is None else self.partial_BTD + output_BTD
        if self.pathway.ends_block(branch):
            entry = observe(self.probe, len(self.history.entries), (self.partial_BTD,))
            self.history = self.history.append(entry, next_read=branch + 1)
            self.partial_BTD = None

    def _finish(self) -> Tensor:
        return self._read(self.pathway.num_branches)


class AttentionResiduals(Pathway):
    """One stream. State kept: every source, and for each the logits of the reads to come.

    Parameters: one query per read that has a choice, `num_queries` times D each.
    """

    name = "attnres"
    Options = AttentionOptions

    def __init__(self, num_branches: int, width: int, options: AttentionOptions, norm_eps: float) -> None:
        super().__init__(num_branches, width, options, norm_eps)
        check_option("block_size", options.block_size, options.block_size <= self.num_layers, f"0 to {self.num_layers}")
        self.branches_per_source = BRANCHES_PER_LAYER * options.block_size or 1
        # Read 0 sees the embedding alone; from read 1 on there is a choice.
        self.queries_JRD = new_queries(options.num_queries, num_branches, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_queries(self.queries_JRD, self.options.query_init_std)

    def ends_block(self, branch: int) -> bool:
        return (branch + 1) % self.branches_per_source == 0 or branch + 1 == self.num_branches

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> AttentionState:
        targets = self.options.num_queries
        history = DepthHistory(
            queries_JRD=self.queries_JRD,
            key_streams=(0,) * targets,
            value_streams=(0,) * targets,
            first_choice=1,
            norm_eps=self.norm_eps,
        )
        history = history.append(observe(probe, 0, (embedding_BTD,)), next_read=0)
        return AttentionState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, history=history)
