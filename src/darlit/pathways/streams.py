"""Widened residual streams: what Hyper-Connections and their manifold-constrained form have in common.

n streams X_1 ... X_n start as copies of the embedding and are summed at the end. A branch reads one mixture of them,
and they are mixed with each other when its output is added:

    x_i = sum_s pre[s] X_s
    X_o <- sum_s res[o, s] X_s + post[o] y_i

A family computes pre, post and res from the streams as they are before the branch.

Shapes: B batch, T token, D width, N streams; a coefficient is a scalar, or ``[B, T]`` where it depends on the token.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from darlit.ops import reference
from darlit.pathways.contract import Pathway, PathwayState, Probe, Streams, observe


class Mixing(NamedTuple):
    """The coefficients of one branch, in the dtype of statistics."""

    pre: Tensor
    """``[N]`` or ``[B, T, N]``: how much of each stream the branch reads."""
    post: Tensor
    """``[N]`` or ``[B, T, N]``: how much of the branch's output each stream takes."""
    res: Tensor | None
    """``[N, N]`` or ``[B, T, N, N]``, row: the stream written, column: the stream it comes from; None: identity."""


@dataclass(kw_only=True)
class StreamsState(PathwayState):
    streams: Streams
    mixing: Mixing | None = None
    """Of the branch that was read and not yet written."""

    def _read(self, branch: int) -> Tensor:
        # Computed again in the backward pass: what it would keep are wide copies of narrow streams, and every iterate
        # of Sinkhorn.
        mixing = checkpoint(self.pathway.mixing, branch, self.streams, use_reentrant=False, preserve_rng_state=False)
        self.mixing = mixing
        if self.probe is not None:
            self.probe.gate("pre", branch, mixing.pre)
            self.probe.gate("post", branch, mixing.post)
            if mixing.res is not None:
                self.probe.gate("res", branch, mixing.res)
        return reference.depth_mix(self.streams, mixing.pre.unbind(-1))

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        assert self.mixing is not None  # the contract has seen to it that read(branch) came first
        _, post, res = self.mixing
        if res is None:
            added = (weight.unsqueeze(-1) * output_BTD for weight in post.unbind(-1))
            streams = tuple((x + y).to(x.dtype) for x, y in zip(self.streams, added, strict=True))
        else:
            sources = (*self.streams, output_BTD)
            rows = zip(res.unbind(-2), post.unbind(-1), strict=True)
            streams = tuple(reference.depth_mix(sources, (*row.unbind(-1), weight)) for row, weight in rows)
        if self.pathway.ends_layer(branch):
            streams = observe(self.probe, self.pathway.depth(branch), streams)
        self.streams, self.mixing = streams, None

    def _finish(self) -> Tensor:
        total_BTD = self.streams[0]
        for stream_BTD in self.streams[1:]:
            total_BTD = total_BTD + stream_BTD
        return total_BTD


class WidenedStreams(Pathway):
    """Base of the pathways with n streams; subclasses give `mixing`."""

    @property
    def num_streams(self) -> int:
        return self.options.num_streams

    @abstractmethod
    def mixing(self, branch: int, streams: Streams) -> Mixing:
        """The coefficients of a branch, from the streams as they are before it."""

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> StreamsState:
        streams = observe(probe, 0, (embedding_BTD,) * self.num_streams)
        return StreamsState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, streams=streams)
