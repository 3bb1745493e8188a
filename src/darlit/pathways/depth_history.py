"""Writing to and reading from the history of earlier depths: what AttnRes and DAR have in common.

A read has J targets. Target j takes its keys from one stream and its values from one stream, and has a query of
its own; AttnRes has one stream and one target, DAR two of each, and a route says which stream serves which.

A query does not depend on the input. So the logits of a source for all reads that will see it are computed once,
when it is written, and nothing is stacked or normalised again at a read. Several reads that see the same completed
sources can have them mixed ahead, see `darlit.ops.two_phase`.

Shapes: B batch, T token, N = B T, D width, J targets, R reads that have a choice, S sources of one read, P reads ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from darlit.ops import fused, reference, two_phase
from darlit.pathways.contract import Probe, Streams, observe


@dataclass(frozen=True)
class Source:
    """The states of all streams at one depth, and what the reads that will see them need."""

    streams: Streams
    first_read: int
    """The read that the first column of the logits belongs to."""
    logits: Streams
    """Reference: per target ``[B, T, reads]``; else one tensor ``[N, J, reads]``."""
    tickets: Streams = ()
    """The fused operators' way back, `fused.TICKETS_PER_READ` for each column; see `darlit.ops.fused`."""

    def tickets_of(self, read: int) -> Streams:
        first = fused.TICKETS_PER_READ * (read - self.first_read)
        return self.tickets[first : first + fused.TICKETS_PER_READ]

    def per_target(self, value_streams: tuple[int, ...]) -> Source:
        """The same with one stream for each target, that of its values, in the targets' order."""
        return replace(self, streams=tuple(self.streams[stream] for stream in value_streams))


@dataclass(frozen=True)
class MixesAhead:
    """What each of the reads to come gets of all completed sources."""

    reads: range
    mixes: Streams
    """J for each read, those of a read side by side."""
    lse_NJP: Tensor

    def as_source(self, read: int) -> Source:
        """The completed sources as one, which has a stream for each target."""
        targets = len(self.mixes) // len(self.reads)
        first = targets * (read - self.reads.start)
        return Source(self.mixes[first : first + targets], self.reads.start, (self.lse_NJP,))


@dataclass(frozen=True)
class DepthHistory:
    """Completed sources of all streams; `append` returns a longer history, this one stays."""

    queries_JRD: Tensor
    key_streams: tuple[int, ...]
    """Per target, the stream whose RMS-normed states are its keys."""
    value_streams: tuple[int, ...]
    """Per target, the stream whose states are its values."""
    first_choice: int
    """The first read with more than one source; earlier reads have nothing to weigh and no query."""
    norm_eps: float
    implementation: str
    """What `darlit.ops.dispatch.choose` chose."""
    probe: Probe | None = None
    sources: tuple[Source, ...] = ()
    ahead: MixesAhead | None = None
    two_phases: bool = True
    """Whether `mix_ahead` may."""

    def source(self, streams: Streams, first_read: int, last_read: int | None = None) -> Source:
        """Make given streams a source for the reads from ``first_read`` on; ``last_read`` None: for all of them."""
        first_read, queries_JRD = self._queries(first_read, last_read)
        if self.implementation != "reference":
            return self._fused_source(streams, None, None, None, first_read, queries_JRD)
        logits = tuple(
            reference.depth_logits(streams[stream], queries_RD, self.norm_eps)
            for stream, queries_RD in zip(self.key_streams, queries_JRD, strict=True)
        )
        return Source(streams, first_read, logits)

    def write(
        self,
        carried: Streams | None,
        output_BTD: Tensor,
        *,
        rho: Tensor | None = None,
        beta: Tensor | None = None,
        first_read: int,
        last_read: int | None = None,
    ) -> Source:
        """Add a branch's gated output to the carried streams and make the result a source.

        The gates are as in `darlit.ops.reference.stream_write`, the reads as in `source`. What all later reads see
        is shown to the probe as the next entry.
        """
        if self.implementation != "reference":
            first_read, queries_JRD = self._queries(first_read, last_read)
            return self._fused_source(carried or (), output_BTD, rho, beta, first_read, queries_JRD)
        streams = reference.stream_write(carried, output_BTD, rho, beta)
        if last_read is None:
            streams = observe(self.probe, len(self.sources), streams)
        return self.source(streams, first_read, last_read)

    def append(self, source: Source) -> DepthHistory:
        """Add a completed source."""
        return replace(self, sources=(*self.sources, source), ahead=None)

    def mix_ahead(self, reads: range) -> DepthHistory:
        """Read the completed sources once for all ``reads`` that come before the next `append`, where that pays.

        Each of these reads then adds the block under way, if there is one, and that is all. No number changes but by
        rounding. The reference is the oracle and always takes one phase.
        """
        values, targets = len(set(self.value_streams)), len(self.value_streams)
        if (
            self.implementation == "reference"
            or not self.two_phases
            or not two_phase.two_phases_pay(len(reads), len(self.sources), values, targets)
        ):
            return self
        *mixes, lse_NJP = two_phase.depth_mixes(
            [stream.detach() for source in self.sources for stream in source.streams],
            [source.logits[0].detach() for source in self.sources],
            [reads.start - source.first_read for source in self.sources],
            len(reads),
            list(self.value_streams),
            self.implementation,
        )
        return replace(self, ahead=MixesAhead(reads, tuple(mixes), lse_NJP))

    def in_one_phase(self) -> DepthHistory:
        """The same history, which has no mixes and makes none."""
        return replace(self, ahead=None, two_phases=False)

    def read(self, read: int, shares: Sequence[Tensor | float], partial: Source | None = None) -> Tensor:
        """``sum_j share_j sum_r softmax_r(logits^j_r) v^j_r``, ``[B, T, D]`` in the streams' dtype.

        Args:
            read: branch index, or the number of branches for the final read.
            shares: how much of the result each target contributes, numbers or ``[1]`` or ``[B, T]`` each; sum one.
            partial: the block under way, one more source.
        """
        sources = self.sources if partial is None else (*self.sources, partial)
        if read < self.first_choice:
            return self._only_source(read, sources)
        if self.implementation != "reference":
            return self._fused_read(read, shares, partial)

        weights = [self._weights(read, target, sources) for target in range(len(self.key_streams))]
        if self.probe is not None:
            for target, weights_BTS in enumerate(weights):
                self.probe.depth_weights(read, target, weights_BTS)
        return _mix([source.streams for source in sources], self.value_streams, weights, shares)

    def _queries(self, first_read: int, last_read: int | None) -> tuple[int, Tensor]:
        first_read = max(first_read, self.first_choice)
        last_row = None if last_read is None else max(last_read + 1, first_read) - self.first_choice
        return first_read, self.queries_JRD[:, first_read - self.first_choice : last_row]

    def _weights(self, read: int, target: int, sources: tuple[Source, ...]) -> Tensor:
        columns = [source.logits[target][..., read - source.first_read] for source in sources]
        return torch.stack(columns, dim=-1).softmax(dim=-1)

    def _only_source(self, read: int, sources: tuple[Source, ...]) -> Tensor:
        if len(sources) != 1:
            raise ValueError(
                f"read {read} needs exactly one source before read {self.first_choice}, got {len(sources)}"
            )
        value_BTD = sources[0].streams[0]
        if self.probe is not None:
            for target in range(len(self.key_streams)):
                self.probe.depth_weights(read, target, value_BTD.new_ones(*value_BTD.shape[:-1], 1))
        return value_BTD

    def _fused_source(
        self,
        carried: Streams,
        output_BTD: Tensor | None,
        rho: Tensor | None,
        beta: Tensor | None,
        first_read: int,
        queries_JRD: Tensor,
    ) -> Source:
        reads = queries_JRD.shape[1]
        tensors = fused.stream_write(
            list(carried),
            output_BTD,
            rho,
            beta,
            queries_JRD,
            list(self.key_streams),
            list(self.value_streams),
            self.norm_eps,
            reads if torch.is_grad_enabled() else 0,
            self.implementation,
        )
        written = 0 if output_BTD is None else len(tensors) - 2 - 2 * reads * torch.is_grad_enabled()
        streams = tuple(tensors[:written]) if written else carried
        return Source(streams, first_read, (tensors[written],), tuple(tensors[written + 2 :]))

    def _fused_read(self, read: int, shares: Sequence[Tensor | float], partial: Source | None) -> Tensor:
        sources = self.sources if partial is None else (*self.sources, partial)
        like, targets = sources[0].streams[0], len(self.value_streams)
        if self.ahead is not None and read in self.ahead.reads:
            mixed = [self.ahead.as_source(read), *([] if partial is None else [partial.per_target(self.value_streams)])]
            value_streams = list(range(targets))
            keep_spreads = True  # without them the backward looks at what was mixed, and mixes would be kept for it
        else:
            mixed, value_streams = list(sources), list(self.value_streams)
            keep_spreads = fused.spreads_pay(len(sources), len(sources[0].streams), targets)
        return fused.depth_read(
            [stream.detach() for source in mixed for stream in source.streams],
            [source.logits[0].detach() for source in mixed],
            [read - source.first_read for source in mixed],
            [ticket for source in sources for ticket in source.tickets_of(read)],
            torch.stack([_share(share, like) for share in shares], dim=-1),
            value_streams,
            keep_spreads and torch.is_grad_enabled(),
            self.implementation,
        )[0]


def _share(share: Tensor | float, like: Tensor) -> Tensor:
    """A scalar for all tokens, or ``[B, T]``."""
    if isinstance(share, float):
        return like.new_full((), share, dtype=torch.float32)
    return share.reshape(()) if share.numel() == 1 else share


def _mix(
    sources: Sequence[Streams],
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
