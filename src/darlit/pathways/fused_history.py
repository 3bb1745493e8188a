"""`darlit.pathways.history.History` over the fused operators of `darlit.ops.depth`.

Completed sources are in a table of addresses that grows with the pass and is shared by forks. Several reads that see
the same completed sources have them mixed ahead where that moves less, see `darlit.ops.depth.prefetch_pays`.

Shapes: B batch, T token, D width, J targets, R reads that have a choice.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from darlit.ops import depth
from darlit.ops.depth import Pass, Prefetched, Source, SourceTable
from darlit.ops.dispatch import backend
from darlit.pathways.contract import Streams
from darlit.pathways.history import Layout


class FusedHistory:
    """A history whose every call is one autograd node.

    Args:
        queries_JRD: of the reads from ``layout.first_choice`` on.
        implementation: cpu, triton or shapes.
        like: the embedding's streams: how many, their shape, dtype and device.
    """

    def __init__(
        self, layout: Layout, queries_JRD: Tensor, norm_eps: float, implementation: str, like: Streams
    ) -> None:
        self.layout, self.implementation = layout, implementation
        self.queries_JRD = queries_JRD
        self.call = Pass(
            queries_JRD, layout.first_choice, layout.key_streams, layout.value_streams, len(like), norm_eps,
            like[0], backend(implementation),
        )  # fmt: skip
        blocks = layout.blocks
        self.table = SourceTable(self.call, 1 + sum(map(blocks.ends, range(blocks.num_branches))))
        self.count = 0
        """How many of the table's sources are this history's."""
        self.partial: Source | None = None
        self.edge = torch.empty(0, device=like[0].device)
        self.prefetched: Prefetched | None = None
        self.prefetches = True
        self.trained = True
        """Whether the queries get a gradient through every source."""

    def read(self, read: int, shares: Tensor) -> Tensor:
        if read < self.layout.first_choice:
            return self.table.sources[0].streams[0]
        self._train()
        partial = self.partial if self.layout.include_partial else None
        ahead = None
        if self.prefetched is not None and read in self.prefetched.reads:
            ahead = self.prefetched.sources[read - self.prefetched.reads.start]
        edge, x_BTD = depth.read(self.edge, shares, self.call, self.table, self.count, partial, read, ahead)
        self._advance(edge)
        return x_BTD

    def write(self, branch: int, output_BTD: Tensor, beta: Tensor, rho: Tensor | None) -> None:
        self._train()
        source = self._new_source((), branch)
        edge = depth.write(self.edge, self.carried, output_BTD, rho, beta, source, self.call)
        self._keep(branch, source, edge)

    def put(self, branch: int, streams: Streams) -> None:
        self._train()
        source = self._new_source(streams, branch)
        self._keep(branch, source, depth.enter(self.edge, source, self.call))

    @property
    def newest(self) -> Streams:
        seen = self.partial if self.layout.include_partial else None
        return (self.table.sources[self.count - 1] if seen is None else seen).streams

    @property
    def carried(self) -> Streams:
        if self.partial is not None:
            return self.partial.streams
        return self.table.sources[self.count - 1].streams if self.layout.carry_partial else ()

    @property
    def num_entries(self) -> int:
        return self.count

    def fork(self) -> FusedHistory:
        # Recomputation keeps what goes into a region until it runs again in the backward pass. Sources are kept
        # anyway; mixes would be kept besides, 2 J for each layer. So a fork has none, and makes none for the next one.
        fork = copy.copy(self)
        fork.prefetched, fork.prefetches = None, False
        return fork

    def _new_source(self, streams: Streams, branch: int) -> Source:
        ends = self._ends(branch)
        first_choice = self.layout.first_choice
        first_read = max(branch + 1, first_choice)
        left = self.call.num_reads - (first_read - first_choice)
        reads = left if ends else min(left, int(self.layout.include_partial))
        return self.call.new_source(streams, first_read, reads, self.count if ends else -1)

    def _keep(self, branch: int, source: Source, edge: Tensor) -> None:
        self._advance(edge)
        self.trained = self.trained and source.trained
        if not self._ends(branch):
            self.partial = source
            return
        self.table, self.partial, self.prefetched = self.table.with_source(self.count, source), None, None
        self.count += 1
        reads = self.layout.blocks.reads_of_next(branch)
        if self.prefetches and depth.prefetch_pays(len(reads), self.count, self.call.values, self.call.targets):
            self.prefetched = depth.prefetch(self.call, self.table, self.count, reads)

    def _ends(self, branch: int) -> bool:
        return branch < 0 or self.layout.blocks.ends(branch)

    def _advance(self, edge: Tensor) -> None:
        if torch.is_grad_enabled():  # a call without gradients is no part of the chain
            self.edge = edge

    def _train(self) -> None:
        """Give the queries a way to get gradients, also through sources that were written without gradients."""
        if not (torch.is_grad_enabled() and self.queries_JRD.requires_grad):
            return
        if not self.edge.requires_grad:
            self.edge = depth.enter_queries(self.edge, self.queries_JRD, self.call)
        if self.trained:
            return
        sources, table = self.table.sources[: self.count], SourceTable(self.call, self.table.capacity)
        for slot, source in enumerate(sources):
            table = table.with_source(slot, self._entered(source))
        self.table, self.trained = table, True
        if self.partial is not None:
            self.partial = self._entered(self.partial)

    def _entered(self, source: Source) -> Source:
        if source.trained:
            return source
        again = copy.copy(source)
        again.ident = next(self.call.idents)
        self.edge = depth.enter(self.edge, again, self.call)
        return again
