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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from darlit.ops import mixing as operators
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


def recomputed(function: Callable[..., Mixing], *arguments: Any) -> Mixing:
    """``function(*arguments)``, computed again in the backward pass: what it would keep between is many small steps,
    wide copies of narrow streams or every iterate of Sinkhorn."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


@dataclass(kw_only=True)
class StreamsState(PathwayState):
    streams: Streams
    kernels: str
    """What `darlit.ops.dispatch.choose` chose."""
    mixing: Mixing | None = None
    """Of the branch that was read and not yet written."""

    def _read(self, branch: int) -> Tensor:
        mixing = self.pathway.mixing(branch, self.streams, self.kernels)
        self.mixing = mixing
        if self.probe is not None:
            self.probe.gate("pre", branch, mixing.pre)
            self.probe.gate("post", branch, mixing.post)
            if mixing.res is not None:
                self.probe.gate("res", branch, mixing.res)
        if self.kernels != "reference":
            return operators.stream_mix(list(self.streams), mixing.pre, self.kernels)[0]
        return reference.depth_mix(self.streams, mixing.pre.unbind(-1))

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        assert self.mixing is not None  # the contract has seen to it that read(branch) came first
        write = _reference_write if self.kernels == "reference" else self._fused_write
        streams = write(self.streams, output_BTD, self.mixing)
        if self.pathway.ends_layer(branch):
            streams = observe(self.probe, self.pathway.depth(branch), streams)
        self.streams, self.mixing = streams, None

    def _fused_write(self, streams: Streams, output_BTD: Tensor, mixing: Mixing) -> Streams:
        _, post, res = mixing
        if res is None:
            identity = torch.eye(len(streams), dtype=post.dtype, device=post.device)
            res = identity.expand(*post.shape, len(streams))
        coefficients = torch.cat([res, post.unsqueeze(-1)], dim=-1).flatten(-2)
        return tuple(operators.stream_mix([*streams, output_BTD], coefficients, self.kernels))

    def _finish(self) -> Tensor:
        total_BTD = self.streams[0]
        for stream_BTD in self.streams[1:]:
            total_BTD = total_BTD + stream_BTD
        return total_BTD


def _reference_write(streams: Streams, output_BTD: Tensor, mixing: Mixing) -> Streams:
    _, post, res = mixing
    if res is None:
        added = (weight.unsqueeze(-1) * output_BTD for weight in post.unbind(-1))
        return tuple((x + y).to(x.dtype) for x, y in zip(streams, added, strict=True))
    rows = zip(res.unbind(-2), post.unbind(-1), strict=True)
    return tuple(reference.depth_mix((*streams, output_BTD), (*row.unbind(-1), weight)) for row, weight in rows)


class WidenedStreams(Pathway):
    """Base of the pathways with n streams; subclasses give `mixing`."""

    @property
    def num_streams(self) -> int:
        return self.options.num_streams

    @abstractmethod
    def mixing(self, branch: int, streams: Streams, implementation: str) -> Mixing:
        """The coefficients of a branch, from the streams as they are before it."""

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> StreamsState:
        streams = observe(probe, 0, (embedding_BTD,) * self.num_streams)
        return StreamsState(
            pathway=self,
            probe=probe,
            embedding_BTD=embedding_BTD,
            streams=streams,
            kernels=self.implementation_for(embedding_BTD, probe),
        )
