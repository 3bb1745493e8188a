"""Widened residual streams: what Hyper-Connections and their manifold-constrained form have in common.

n streams X_1 ... X_n start as copies of the embedding and are summed at the end. A branch reads one mixture of them,
and they are mixed with each other when its output is added:

    x_i = sum_s pre[s] X_s
    X_o <- sum_s res[o, s] X_s + post[o] y_i

A family computes pre, post and res from the streams as they are before the branch. `PlainStreams` is the definition;
`FusedStreams` computes the same with kernels.

Shapes: B batch, T token, D width, N streams; a coefficient is a scalar, or ``[B, T]`` where it depends on the token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from darlit.ops import reference
from darlit.ops import streams as operators
from darlit.ops.dispatch import backend
from darlit.pathways.contract import OncePerPass, Pathway, PathwayState, Probe, Streams, observe


class Mixing(NamedTuple):
    """The coefficients of one branch, in the dtype of statistics."""

    pre: Tensor
    """``[N]`` or ``[B, T, N]``: how much of each stream the branch reads."""
    post: Tensor
    """``[N]`` or ``[B, T, N]``: how much of the branch's output each stream takes."""
    res: Tensor | None
    """``[N, N]`` or ``[B, T, N, N]``, row: the stream written, column: the stream it comes from; None: identity."""


class KernelGates(NamedTuple):
    """What the kernels take of a family, per branch."""

    family: str
    weights: list[Tensor]
    """As `darlit.ops.streams.gated_read` takes them; none: the connections are static."""
    parameters: tuple[Tensor, ...]
    """Of one branch ``[P]``; static: pre ``[N]``, then of each stream written its row of res and its post."""


def recomputed(function: Callable[..., Mixing], *arguments: Any) -> Mixing:
    """``function(*arguments)``, computed again in the backward pass: what it would keep between is many small steps,
    upcast copies of narrow streams or every iterate of Sinkhorn."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


@dataclass
class PlainStreams:
    """The equations as they are."""

    pathway: Any
    streams: Streams
    probe: Probe | None
    mixing: Mixing | None = None
    """Of the branch that was read and not yet written."""
    implementation: str = "reference"

    def read(self, branch: int) -> Tensor:
        self.mixing = mixing = recomputed(self.pathway.mixing, branch, self.streams)
        if self.probe is not None:
            for name, value in mixing._asdict().items():
                if value is not None:
                    self.probe.gate(name, branch, value)
        return reference.depth_mix(self.streams, mixing.pre.unbind(-1))

    def write(self, branch: int, output_BTD: Tensor) -> None:
        del branch
        assert self.mixing is not None  # the contract has seen to it that read(branch) came first
        (_, post, res), self.mixing = self.mixing, None
        if res is None:
            added = (weight.unsqueeze(-1) * output_BTD for weight in post.unbind(-1))
            self.streams = tuple((x + y).to(x.dtype) for x, y in zip(self.streams, added, strict=True))
        else:
            sources, rows = (*self.streams, output_BTD), zip(res.unbind(-2), post.unbind(-1), strict=True)
            self.streams = tuple(reference.depth_mix(sources, (*row.unbind(-1), weight)) for row, weight in rows)


@dataclass
class FusedStreams:
    """Each call is one autograd node."""

    gates: OncePerPass[KernelGates]
    streams: Streams
    norm_eps: float
    implementation: str
    write_coefficients: Tensor | None = None

    def read(self, branch: int) -> Tensor:
        gates, kernels = self.gates.get(), backend(self.implementation)
        parameters = gates.parameters[branch]
        if not gates.weights:
            n = len(self.streams)
            pre, self.write_coefficients = parameters[:n], parameters[n:]
            return operators.stream_mix(self.streams, pre, kernels)[0]
        x_BTD, self.write_coefficients, self.streams = operators.gated_read(
            self.streams, gates.weights[branch], parameters, gates.family, self.norm_eps, kernels
        )
        return x_BTD

    def write(self, branch: int, output_BTD: Tensor) -> None:
        del branch
        assert self.write_coefficients is not None
        sources, coefficients = (*self.streams, output_BTD), self.write_coefficients
        self.streams = operators.stream_mix(sources, coefficients, backend(self.implementation))
        self.write_coefficients = None


@dataclass(kw_only=True)
class StreamsState(PathwayState):
    widened: PlainStreams | FusedStreams

    @property
    def implementation(self) -> str:
        return self.widened.implementation

    def fork(self) -> StreamsState:
        return replace(self, widened=replace(self.widened))

    def _read(self, branch: int) -> Tensor:
        return self.widened.read(branch)

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        self.widened.write(branch, output_BTD)
        if self.pathway.ends_layer(branch):
            self.widened.streams = observe(self.probe, self.pathway.depth(branch), self.widened.streams)

    def _finish(self) -> Tensor:
        total_BTD, *rest = self.widened.streams
        for stream_BTD in rest:
            total_BTD = total_BTD + stream_BTD
        return total_BTD


class WidenedStreams(Pathway):
    """Base of the pathways with n streams; subclasses say what `mixing` is and what the kernels take for it."""

    @property
    def num_streams(self) -> int:
        return self.options.num_streams

    @abstractmethod
    def mixing(self, branch: int, streams: Streams) -> Mixing:
        """The coefficients of a branch, from the streams as they are before it."""

    @abstractmethod
    def kernel_gates(self) -> KernelGates:
        """The same for the kernels, made once a pass."""

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> StreamsState:
        self.check_embedding(embedding_BTD)
        streams = observe(probe, 0, (embedding_BTD,) * self.num_streams)
        implementation = self.implementation_for(embedding_BTD, probe)
        widened: PlainStreams | FusedStreams
        if implementation == "reference":
            widened = PlainStreams(self, streams, probe)
        else:
            widened = FusedStreams(OncePerPass(self.kernel_gates), streams, self.norm_eps, implementation)
        return StreamsState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, widened=widened)
