"""The history of earlier depths that AttnRes and DAR read from and write to.

A read has J targets. Target j takes its keys from one stream and its values from one stream, and has a query of its
own; AttnRes has one stream and one target, DAR two of each, and a route says which stream serves which:

    k^j_r = RMSNorm(stream key_j of entry r)
    a^j   = softmax_r <w^j_i, k^j_r>           over completed entries, then the block that is being written
    h^j   = sum_r a^j_r (stream value_j of entry r)
    x_i   = sum_j share_j h^j

Branches are grouped in blocks; after the last branch of a block its streams become one more entry.

`PlainHistory` is the definition: any device and dtype, visible to a probe, traced by `torch.compile`.
`darlit.pathways.fused_history.FusedHistory` computes the same with kernels; `start_history` chooses one of them.

Shapes: B batch, T token, D width, J targets, R reads that have a choice, S entries of one read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from darlit.ops import reference
from darlit.pathways.contract import Pathway, Probe, Streams, observe

HistoryT = TypeVar("HistoryT", bound="History")


@dataclass(frozen=True)
class Blocks:
    """Blocks of ``size`` branches each; the last one takes the remainder."""

    num_branches: int
    size: int

    def ends(self, branch: int) -> bool:
        """Whether a block is complete with this branch."""
        return (branch + 1) % self.size == 0 or branch + 1 == self.num_branches

    def reads_of_next(self, branch: int) -> range:
        """The branches of the block after the one that ends with ``branch``, none after the last block.

        No other block is complete when they read.
        """
        return range(branch + 1, min(branch + 1 + self.size, self.num_branches))


@dataclass(frozen=True)
class Layout:
    """What a family says about its reads and blocks."""

    key_streams: tuple[int, ...]
    """Per target, the stream whose RMS-normed states are its keys."""
    value_streams: tuple[int, ...]
    """Per target, the stream whose states are its values."""
    blocks: Blocks
    first_choice: int = 1
    """The first read with more than one entry; earlier reads have nothing to weigh and no query."""
    include_partial: bool = True
    """Whether the block that is being written is read."""
    carry_partial: bool = False
    """Whether a block starts from the last entry instead of empty."""


class History(Protocol):
    """The interface; `fork` returns a copy that shares tensors and nothing else."""

    implementation: str

    def read(self, read: int, shares: Tensor) -> Tensor:
        """``x [B, T, D]`` of branch ``read``, or of the final read; ``shares`` ``[J]`` or ``[B, T, J]``, in sum one."""

    def write(self, branch: int, output_BTD: Tensor, beta: Tensor, rho: Tensor | None) -> None:
        """``P^j <- rho P^j + (1 - rho) P^{1-j} + beta^j output``, of an empty block ``P^j <- beta^j output``.

        ``beta`` ``[M]`` or ``[B, T, M]``; ``rho`` ``[1]`` or ``[B, T, 1]``, None: P is carried as it is.
        """

    def put(self, branch: int, streams: Streams) -> None:
        """The block consists of these streams after ``branch``."""

    @property
    def newest(self) -> Streams:
        """The streams of the last source of the next read."""

    @property
    def carried(self) -> Streams:
        """The streams that the next write adds to; none where the block is empty."""

    @property
    def num_entries(self) -> int:
        """Completed entries, the embedding counted."""

    def fork(self: HistoryT) -> HistoryT: ...


@dataclass(frozen=True)
class Entry:
    """The states of all streams at one depth, and what the reads that see them need."""

    streams: Streams
    first_read: int
    """The read that the first column of the logits belongs to."""
    logits: Streams
    """Per target ``[B, T, reads]``: queries do not depend on the input, so the logits of all reads come at once."""


@dataclass
class PlainHistory:
    """The equations as they are."""

    layout: Layout
    queries_JRD: Tensor
    norm_eps: float
    probe: Probe | None = None
    entries: tuple[Entry, ...] = ()
    partial: Entry | None = None
    implementation: str = "reference"

    def read(self, read: int, shares: Tensor) -> Tensor:
        entries = self.entries
        if self.partial is not None and self.layout.include_partial:
            entries = (*entries, self.partial)
        weights = [self._weights(read, target, entries) for target in range(len(self.layout.key_streams))]
        if self.probe is not None:
            for target, weights_BTS in enumerate(weights):
                self.probe.depth_weights(read, target, weights_BTS)
        if read < self.layout.first_choice:
            return entries[0].streams[0]
        # Targets that take their values from one stream add their coefficients first.
        totals: dict[int, Tensor] = {}
        for target, stream in enumerate(self.layout.value_streams):
            scaled_BTS = shares[..., target, None] * weights[target]
            totals[stream] = totals[stream] + scaled_BTS if stream in totals else scaled_BTS
        values = [entry.streams[stream] for stream in totals for entry in entries]
        return reference.depth_mix(values, [c_BT for total_BTS in totals.values() for c_BT in total_BTS.unbind(-1)])

    def _weights(self, read: int, target: int, entries: tuple[Entry, ...]) -> Tensor:
        if read < self.layout.first_choice:
            return torch.ones_like(entries[0].streams[0][..., :1])
        return torch.stack([self._logit(read, target, entry) for entry in entries], dim=-1).softmax(dim=-1)

    def _logit(self, read: int, target: int, entry: Entry) -> Tensor:
        logit_BT = entry.logits[target][..., read - entry.first_read]
        if logit_BT.requires_grad or not (torch.is_grad_enabled() and self.queries_JRD.requires_grad):
            return logit_BT
        # Written without gradients, but this read's query is trained.
        row = read - self.layout.first_choice
        key_BTD = entry.streams[self.layout.key_streams[target]]
        return reference.depth_logits(key_BTD, self.queries_JRD[target, row, None], self.norm_eps)[..., 0]

    def write(self, branch: int, output_BTD: Tensor, beta: Tensor, rho: Tensor | None) -> None:
        streams = tuple((weight.unsqueeze(-1) * output_BTD).to(output_BTD.dtype) for weight in beta.unbind(-1))
        carried = self.carried
        if carried and rho is not None:
            carried = transport(carried, rho)
        if carried:
            streams = tuple(p_BTD + y_BTD for p_BTD, y_BTD in zip(carried, streams, strict=True))
        if self.layout.blocks.ends(branch):
            streams = observe(self.probe, len(self.entries), streams)
        self.put(branch, streams)

    def put(self, branch: int, streams: Streams) -> None:
        ends = branch < 0 or self.layout.blocks.ends(branch)
        first_read = max(branch + 1, self.layout.first_choice)
        first_row = first_read - self.layout.first_choice
        rows = slice(first_row, None if ends else first_row + self.layout.include_partial)
        logits = tuple(
            reference.depth_logits(streams[stream], queries_RD[rows], self.norm_eps)
            for stream, queries_RD in zip(self.layout.key_streams, self.queries_JRD, strict=True)
        )
        entry = Entry(streams, first_read, logits)
        if ends:
            self.entries, self.partial = (*self.entries, entry), None
        else:
            self.partial = entry

    @property
    def newest(self) -> Streams:
        seen = self.partial if self.layout.include_partial else None
        return (self.entries[-1] if seen is None else seen).streams

    @property
    def carried(self) -> Streams:
        if self.partial is not None:
            return self.partial.streams
        return self.entries[-1].streams if self.layout.carry_partial else ()

    @property
    def num_entries(self) -> int:
        return len(self.entries)

    def fork(self) -> PlainHistory:
        return replace(self)


def transport(streams: Streams, rho: Tensor) -> Streams:
    """Doubly stochastic exchange ``P^j <- rho P^j + (1 - rho) P^{1-j}``, ``rho`` a scalar or ``[B, T, 1]``.

    Written as a step towards the other stream, so that equal streams stay equal to the last bit.
    """
    one, two = streams
    step_BTD = (1 - rho) * (two - one)
    return (one + step_BTD).to(one.dtype), (two - step_BTD).to(two.dtype)


def start_history(pathway: Pathway, layout: Layout, queries_JRD: Tensor, streams: Streams, probe: Probe | None) -> Any:
    """A history that begins with the embedding's streams, of the implementation that serves them."""
    implementation = pathway.implementation_for(streams[0], probe)
    if implementation == "reference":
        history: Any = PlainHistory(layout, queries_JRD, pathway.norm_eps, probe)
    else:
        from darlit.pathways.fused_history import FusedHistory

        history = FusedHistory(layout, queries_JRD, pathway.norm_eps, implementation, streams)
    history.put(-1, streams)
    return history


def new_queries(num_targets: int, num_reads: int, width: int) -> nn.Parameter:
    """Uninitialised queries ``[J, R, D]``, in float32 by default."""
    return nn.Parameter(torch.empty(num_targets, num_reads, width))


def reset_queries(queries_JRD: nn.Parameter, std: float) -> None:
    """Zero queries (every read starts as the mean of its sources), or normal ones of the given std."""
    if std == 0:
        nn.init.zeros_(queries_JRD)
    else:
        nn.init.normal_(queries_JRD, std=std)
