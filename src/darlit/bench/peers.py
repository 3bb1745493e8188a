"""What the arms are compared with: the naive DAR that anyone would write first, and other people's packages.

Each peer computes what its name says for the same given outputs; a package that is not installed is left out, by name.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darlit.bench.arms import Shape
from darlit.pathways.dual_attention import DualAttention, DualAttentionOptions

EPS = 1e-6


class NaiveDarState:
    """DAR-Full as its equations read: stack, RMSNorm, einsum, softmax, einsum, per read and stream."""

    def __init__(self, pathway: DualAttention, embedding: Tensor) -> None:
        self.pathway = pathway
        self.history: list[list[Tensor]] = [[embedding], [embedding]]
        self.partial: list[Tensor] | None = None

    def read(self, branch: int) -> Tensor:
        if branch == 0:
            return self.history[0][0]
        alpha = self.pathway.alpha(branch, None)
        stacks = [
            torch.stack(self.history[j] if self.partial is None else [*self.history[j], self.partial[j]])
            for j in (0, 1)
        ]
        mixed = []
        for j in (0, 1):
            keys = F.rms_norm(stacks[1 - j], stacks[j].shape[-1:], eps=EPS)
            weights = torch.einsum("sbtd,d->sbt", keys, self.pathway.queries_JRD[j, branch - 1]).softmax(0)
            mixed.append(torch.einsum("sbt,sbtd->btd", weights, stacks[j]))
        return alpha * mixed[0] + (1 - alpha) * mixed[1]

    def write(self, branch: int, output: Tensor) -> None:
        beta = 2 * self.pathway.beta(branch, None)
        if self.partial is None:
            self.partial = [beta[j] * output for j in (0, 1)]
        else:
            rho, old = self.pathway.rho(branch, None), self.partial
            self.partial = [rho * old[j] + (1 - rho) * old[1 - j] + beta[j] * output for j in (0, 1)]
        if self.pathway.ends_block(branch):
            for j in (0, 1):
                self.history[j].append(self.partial[j])
            self.partial = None

    def finish(self) -> Tensor:
        return self.read(self.pathway.num_branches)


class NaiveDar(nn.Module):
    """The parameters of the real one, and the naive state."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.real = DualAttention(shape.branches, shape.width, DualAttentionOptions(), EPS)

    def start(self, embedding: Tensor) -> NaiveDarState:
        return NaiveDarState(self.real, embedding)


class FlaAttnRes(nn.Module):
    """AttnRes-Full through fla-core's operator, naive on a CPU and fused on a GPU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(shape.branches, shape.width))
        self.register_buffer("gain", torch.ones(shape.width))

    def start(self, embedding: Tensor) -> Any:
        return FlaState(self, embedding)


class FlaState:
    def __init__(self, pathway: FlaAttnRes, embedding: Tensor) -> None:
        from fla.ops.attnres import fused_attnres, naive_attnres

        self.operator = fused_attnres if embedding.is_cuda else naive_attnres
        self.pathway, self.sources = pathway, [embedding]

    def read(self, branch: int) -> Tensor:
        if branch == 0:
            return self.sources[0]
        return self.operator(self.pathway.queries[branch - 1], self.sources, self.pathway.gain, rms_eps=EPS)

    def write(self, branch: int, output: Tensor) -> None:
        del branch
        self.sources.append(output)

    def finish(self) -> Tensor:
        return self.read(len(self.pathway.queries))


class HyperConnectionsPeer(nn.Module):
    """Two dynamic streams of the hyper-connections package."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from hyper_connections import get_init_and_expand_reduce_stream_functions

        make, self.expand, self.reduce = get_init_and_expand_reduce_stream_functions(2, dim=shape.width)
        self.connections = nn.ModuleList(make(dim=shape.width, layer_index=i) for i in range(shape.branches))

    def start(self, embedding: Tensor) -> Any:
        return HyperConnectionsState(self, embedding)


class HyperConnectionsState:
    def __init__(self, pathway: HyperConnectionsPeer, embedding: Tensor) -> None:
        self.pathway, self.streams = pathway, pathway.expand(embedding)

    def read(self, branch: int) -> Tensor:
        x, self.add = self.pathway.connections[branch](self.streams)
        return x

    def write(self, branch: int, output: Tensor) -> None:
        del branch
        self.streams = self.add(output)

    def finish(self) -> Tensor:
        return self.pathway.reduce(self.streams)


PACKAGES: dict[str, tuple[str, type[nn.Module]]] = {
    "fla-core attnres_full": ("fla", FlaAttnRes),
    "hyper-connections hc2": ("hyper_connections", HyperConnectionsPeer),
}


def naive_dar(shape: Shape) -> nn.Module:
    return NaiveDar(shape).to(shape.device)


def installed(shape: Shape) -> dict[str, nn.Module]:
    """Peers by name, those whose package can be found."""
    return {
        name: make(shape).to(shape.device)
        for name, (package, make) in PACKAGES.items()
        if importlib.util.find_spec(package)
    }


def missing() -> list[str]:
    return [name for name, (package, _) in PACKAGES.items() if not importlib.util.find_spec(package)]
