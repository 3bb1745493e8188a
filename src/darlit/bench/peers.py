"""Other people's packages that the arms are compared with.

Each peer computes what its name says for the same given outputs; a package that is not installed is left out, by name.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from darlit.bench.arms import Shape

EPS = 1e-6


class SourcesPeer(nn.Module):
    """AttnRes-Full: a query for every read but the first, gain 1; subclasses call a package's ``operator``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(shape.branches, shape.width))
        self.register_buffer("gain", torch.ones(shape.width))

    def start(self, embedding: Tensor) -> Any:
        return SourcesState(self, embedding)

    def operator(self, query: Tensor, sources: list[Tensor]) -> Tensor:
        raise NotImplementedError


class SourcesState:
    def __init__(self, pathway: SourcesPeer, embedding: Tensor) -> None:
        self.pathway, self.sources = pathway, [embedding]

    def read(self, branch: int) -> Tensor:
        if branch == 0:
            return self.sources[0]
        return self.pathway.operator(self.pathway.queries[branch - 1], self.sources)

    def write(self, branch: int, output: Tensor) -> None:
        del branch
        self.sources.append(output)

    def finish(self) -> Tensor:
        return self.read(len(self.pathway.queries))


class FlaAttnRes(SourcesPeer):
    """fla-core's operator, naive on a CPU and fused on a GPU."""

    def operator(self, query: Tensor, sources: list[Tensor]) -> Tensor:
        from fla.ops.attnres import fused_attnres, naive_attnres

        mixed = fused_attnres if query.is_cuda else naive_attnres
        return mixed(query, sources, self.gain, rms_eps=EPS)


class LigerAttnRes(SourcesPeer):
    """liger-kernel's operator, which takes its sources stacked."""

    def operator(self, query: Tensor, sources: list[Tensor]) -> Tensor:
        from liger_kernel.ops.attn_res import LigerAttnResFunction

        return LigerAttnResFunction.apply(torch.stack(sources), query, self.gain, EPS)


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


class LigerMHC(nn.Module):
    """mHC with two streams through liger-kernel's operators; both streams lie in one tensor."""

    STREAMS = 2

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        n = self.STREAMS
        connections = n * n + 2 * n
        self.phi = nn.Parameter(0.02 * torch.randn(shape.branches, n * shape.width, connections))
        self.bias = nn.Parameter(torch.zeros(shape.branches, connections))
        self.alphas = nn.Parameter(torch.full((shape.branches, 3), 0.01))

    def start(self, embedding: Tensor) -> Any:
        return LigerMHCState(self, embedding)


class LigerMHCState:
    def __init__(self, pathway: LigerMHC, embedding: Tensor) -> None:
        self.pathway = pathway
        self.streams = torch.stack([embedding] * pathway.STREAMS, dim=-2)

    def read(self, branch: int) -> Tensor:
        from liger_kernel.ops.mhc import LigerMHCCoeffsFunction, LigerMHCPreFunction

        pathway, narrow = self.pathway, self.streams.dtype
        pre, self.post, self.res = LigerMHCCoeffsFunction.apply(
            self.streams,
            pathway.phi[branch].to(narrow),
            pathway.bias[branch].float(),
            *pathway.alphas[branch].float().unbind(),
            narrow == torch.float32,
            20,  # iterations of Sinkhorn, as the paper
            EPS,
            0.0,
            EPS,
            2.0,
        )
        return LigerMHCPreFunction.apply(self.streams, pre).to(narrow)

    def write(self, branch: int, output: Tensor) -> None:
        from liger_kernel.ops.mhc import LigerMHCPostResFunction

        del branch
        self.streams = LigerMHCPostResFunction.apply(self.streams, output, self.post, self.res)

    def finish(self) -> Tensor:
        return self.streams.sum(-2)


class FlashAttnRes(nn.Module):
    """AttnRes-Block K = 4 through flash-attn-res: completed blocks once for all reads of a block, then a merge."""

    READS = 8

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(shape.branches + 1, shape.width))

    def start(self, embedding: Tensor) -> Any:
        return FlashAttnResState(self, embedding)


class FlashAttnResState:
    def __init__(self, pathway: FlashAttnRes, embedding: Tensor) -> None:
        self.pathway, self.blocks = pathway, [embedding]
        self.partial: Tensor | None = None

    def read(self, branch: int) -> Tensor:
        from flash_attn_res.ops.phase_1 import phase_1_batched_attention_triton_op as completed
        from flash_attn_res.ops.phase_2 import phase_2_online_softmax_merge_triton_op as merged

        offset = branch % self.pathway.READS
        if offset == 0:
            if self.partial is not None:
                self.blocks.append(self.partial)
                self.partial = None
            queries = self.pathway.queries[branch : branch + self.pathway.READS]
            self.mixed, self.lse = completed(torch.stack(self.blocks), queries, EPS)
        if self.partial is None:
            return self.mixed[offset]
        return merged(self.partial, self.pathway.queries[branch], self.mixed[offset], self.lse[offset], EPS)

    def write(self, branch: int, output: Tensor) -> None:
        del branch
        self.partial = output if self.partial is None else self.partial + output

    def finish(self) -> Tensor:
        return self.read(len(self.pathway.queries) - 1)


class Peer(NamedTuple):
    package: str
    module: str
    make: type[nn.Module]
    needs_gpu: bool


PEERS: dict[str, Peer] = {
    "fla-core attnres_full": Peer("fla-core", "fla", FlaAttnRes, needs_gpu=False),
    "hyper-connections hc2": Peer("hyper-connections", "hyper_connections", HyperConnectionsPeer, needs_gpu=False),
    "liger-kernel attnres_full": Peer("liger-kernel", "liger_kernel", LigerAttnRes, needs_gpu=True),
    "liger-kernel mhc2": Peer("liger-kernel", "liger_kernel", LigerMHC, needs_gpu=True),
    "flash-attn-res attnres_block4": Peer("flash-attn-res", "flash_attn_res", FlashAttnRes, needs_gpu=True),
}


def installed(shape: Shape) -> dict[str, nn.Module]:
    """Peers by name, those that can run here."""
    absent = skipped(shape)
    return {name: peer.make(shape).to(shape.device) for name, peer in PEERS.items() if name not in absent}


def skipped(shape: Shape) -> dict[str, str]:
    """Peers that cannot run here, and why."""
    reasons = {}
    for name, peer in PEERS.items():
        if not importlib.util.find_spec(peer.module):
            reasons[name] = f"not installed: pip install {peer.package}"
        elif peer.needs_gpu and torch.device(shape.device).type != "cuda":
            reasons[name] = "needs a GPU"
    return reasons
