"""Reading from the history of earlier depths: what AttnRes and DAR have in common.

A read has J targets. Target j takes its keys from one stream and its values from one stream, and has a query of
its own; AttnRes has one stream and one target, DAR two of each, and a route says which stream serves which.

A query does not depend on the input. So the logits of an entry for all later reads are computed by one matrix
product when the entry is appended, and nothing is stacked or normalised again at a read.

Shapes: B batch, T token, D width, J targets, R reads that have a choice, S sources of one read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from darlit.ops import reference
from darlit.pathways.contract import Probe, Streams


@dataclass(frozen=True)
class DepthHistory:
    """Completed entries of all streams and their logits; `append` returns a longer history, this one stays."""

    queries_JRD: Tensor
    key_streams: tuple[int, ...]
    """Per target, the stream whose RMS-normed states are its keys."""
    value_streams: tuple[int, ...]
    """Per target, the stream whose states are its values."""
    first_choice: int
    """The first read with more than one source; earlier reads have nothing to weigh and no query."""
    norm_eps: float
    entries: tuple[Streams, ...] = ()
    logits: tuple[Streams, ...] = ()
    """Per entry and target ``[B, T, reads left]``."""
    first_reads: tuple[int, ...] = ()
    """Per entry, the read that its first column of logits belongs to."""

    def append(self, streams: Streams, next_read: int) -> DepthHistory:
        """Add a completed entry that read ``next_read`` is the first to see."""
        first_read = max(next_read, self.first_choice)
        return replace(
            self,
            entries=(*self.entries, streams),
            logits=(*self.logits, self._logits(streams, first_read, last_read=None)),
            first_reads=(*self.first_reads, first_read),
        )

    def read(
        self,
        read: int,
        shares: Sequence[Tensor | float],
        partial: Streams | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """``sum_j share_j sum_r softmax_r(logits^j_r) v^j_r``, ``[B, T, D]`` in the streams' dtype.

        Args:
            read: branch index, or the number of branches for the final read.
            shares: how much of the result each target contributes, a number or ``[B, T]`` each.
            partial: the states of the block under way, one more source.
            probe: sees the weights of each target.
        """
        sources = self.entries if partial is None else (*self.entries, partial)
        if read < self.first_choice:
            return self._only_source(read, sources, probe)

        weights = [self._weights(read, target, partial) for target in range(len(self.key_streams))]
        if probe is not None:
            for target, weights_BTS in enumerate(weights):
                probe.depth_weights(read, target, weights_BTS)
        return _mix(sources, self.value_streams, weights, shares)

    def _weights(self, read: int, target: int, partial: Streams | None) -> Tensor:
        columns = [
            logits[target][..., read - first_read]
            for logits, first_read in zip(self.logits, self.first_reads, strict=True)
        ]
        if partial is not None:
            columns.append(self._logits(partial, read, read)[target][..., 0])
        return torch.stack(columns, dim=-1).softmax(dim=-1)

    def _logits(self, streams: Streams, first_read: int, last_read: int | None) -> Streams:
        rows = slice(first_read - self.first_choice, None if last_read is None else last_read - self.first_choice + 1)
        return tuple(
            reference.depth_logits(streams[stream], self.queries_JRD[target, rows], self.norm_eps)
            for target, stream in enumerate(self.key_streams)
        )

    def _only_source(self, read: int, sources: tuple[Streams, ...], probe: Probe | None) -> Tensor:
        if len(sources) != 1:
            raise ValueError(
                f"read {read} needs exactly one source before read {self.first_choice}, got {len(sources)}"
            )
        value_BTD = sources[0][0]
        if probe is not None:
            for target in range(len(self.key_streams)):
                probe.depth_weights(read, target, value_BTD.new_ones(*value_BTD.shape[:-1], 1))
        return value_BTD


def _mix(
    sources: tuple[Streams, ...],
    value_streams: tuple[int, ...],
    weights: Sequence[Tensor],
    shares: Sequence[Tensor | float],
) -> Tensor:
    """Mix every (stream, source) once: targets that share a value stream add their coefficients first."""
    totals_BTS: dict[int, Tensor] = {}
    for stream, share, weights_BTS in zip(value_streams, shares, weights, strict=True):
        share_BT1 = share if isinstance(share, float) else share.unsqueeze(-1)
        scaled_BTS = share_BT1 * weights_BTS
        totals_BTS[stream] = totals_BTS[stream] + scaled_BTS if stream in totals_BTS else scaled_BTS
    values = [streams[stream] for stream in totals_BTS for streams in sources]
    coefficients = [column_BT for total_BTS in totals_BTS.values() for column_BT in total_BTS.unbind(-1)]
    return reference.depth_mix(values, coefficients)


def new_queries(num_targets: int, num_reads: int, width: int) -> nn.Parameter:
    """Uninitialised queries ``[J, R, D]``, always kept in float32 by default."""
    return nn.Parameter(torch.empty(num_targets, num_reads, width))


def reset_queries(queries_JRD: nn.Parameter, std: float) -> None:
    """Zero queries (every read starts as the mean of its sources), or normal ones of the given std."""
    if std == 0:
        nn.init.zeros_(queries_JRD)
    else:
        nn.init.normal_(queries_JRD, std=std)
