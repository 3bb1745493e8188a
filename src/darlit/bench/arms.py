"""What is measured: pathways by the names that the table prints, driven without any branch between read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from darlit import pathways
from darlit.catalog import arm
from darlit.ops.two_phase import two_phases_pay
from darlit.pathways.blocks import Blocks


@dataclass(frozen=True)
class Shape:
    """Of one measurement. Tokens N, width D, layers L of two branches each."""

    tokens: int = 2048
    width: int = 512
    layers: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    clock: str = "wall"

    @property
    def branches(self) -> int:
        return 2 * self.layers

    @property
    def tensor_bytes(self) -> int:
        return self.tokens * self.width * torch.empty((), dtype=getattr(torch, self.dtype)).element_size()

    def new(self, **options: Any) -> Tensor:
        return torch.randn(1, self.tokens, self.width, dtype=getattr(torch, self.dtype), device=self.device, **options)


ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    # auto is 4 at 32 layers; the bench's own depths are fewer, with blocks of the same size.
    name: arm(name.removesuffix("4"), num_layers=32)
    for name in ("residual", "attnres_full", "attnres_block4", "dar_full", "dar_block4", "mhc2")
}


def fitting(shape: Shape) -> list[str]:
    """The arms that this many layers have room for: a block is not deeper than the model."""
    return [arm for arm, (_, options) in ARMS.items() if options.get("block_size", 0) <= shape.layers]


def build(arm: str, shape: Shape, implementation: str = "auto") -> pathways.Pathway:
    name, options = ARMS[arm]
    pathway = pathways.build(
        name, num_branches=shape.branches, width=shape.width, implementation=implementation, **options
    )
    return pathway.to(shape.device)


class PathWork:
    """Forward and backward of a pathway alone: given outputs are written, every read gets the same given gradient."""

    def __init__(self, pathway: Any, shape: Shape) -> None:
        self.pathway, self.shape = pathway, shape
        self.embedding = shape.new(requires_grad=True)
        self.outputs = [shape.new(requires_grad=True) for _ in range(shape.branches)]
        self.gradient = shape.new()

    def forward(self) -> list[Tensor]:
        state = self.pathway.start(self.embedding)
        reads = []
        for branch, output in enumerate(self.outputs):
            reads.append(state.read(branch))
            state.write(branch, output)
        return [*reads, state.finish()]

    def __call__(self) -> None:
        for leaf in (self.embedding, *self.outputs, *self.pathway.parameters()):
            leaf.grad = None
        reads = self.forward()
        torch.autograd.backward(reads, [self.gradient] * len(reads))

    @property
    def held(self) -> list[Tensor]:
        return [self.embedding, *self.outputs, self.gradient, *self.pathway.parameters()]


def path_work(arm: str, shape: Shape, implementation: str = "auto") -> PathWork:
    torch.manual_seed(0)
    return PathWork(build(arm, shape, implementation), shape)


def moved_tensors(arm: str, layers: int) -> int | None:
    """How many ``[N, D]`` tensors the fused algorithm must move, forward and backward; None: no floor derived.

    Each tensor that an operator needs is counted once per operator, as in docs/performance.md:
    a read takes its S sources of M streams and gives x and J - 1 spreads; where two phases pay, the completed sources
    are read once for a block and each of its reads takes J mixes of them instead. A write takes the output and the
    carried streams and gives new ones. Backward, a read takes its gradient, x and the spreads, and a write takes the
    answers of its A readers, its streams and what arrived for them, the carried streams and the output, and gives the
    gradients of both.
    """
    name, options = ARMS[arm]
    branches = 2 * layers
    if name == "residual":
        return 3 * branches + branches  # x + y -> x; backward the read's gradient is added to the one carried
    if name not in ("attnres", "dar"):
        return None
    streams = 2 if name == "dar" else 1
    per_block = 2 * options.get("block_size", 1) if name == "dar" else max(1, 2 * options.get("block_size", 0))

    blocks = Blocks(branches, per_block)
    ends = [branch for branch in range(branches) if blocks.ends(branch)]
    moved = 1 + 1 + branches + 1  # the embedding's logits; its gradient: itself, its readers' answers, the sum
    sources, ahead = 1, range(0)
    for read in range(1, branches + 1):
        partial = read - 1 not in ends
        sources += not partial
        completed = 1 + streams * (sources - 1)  # the embedding's streams are one tensor
        if not partial:
            ahead = blocks.reads_of_next(read - 1)
            if two_phases_pay(len(ahead), sources, streams, streams):
                moved += completed + streams * len(ahead)
            else:
                ahead = range(0)
        moved += (streams if read in ahead else completed) + streams * partial + 1 + (streams - 1)  # x, spread
        moved += 2 + (streams - 1)  # backward: gradient, x, spread
    for branch in range(branches):
        carried = streams * (branch % per_block != 0)
        readers = branches - branch if branch in ends else 1
        arrived = 0 if branch in ends else streams
        if name == "attnres":
            # An output that is an entry is only read for its logits. A running sum is a plain addition.
            moved += 1 + (3 if carried else 0) + readers + 1 + 1 + (3 if arrived else 0)
        else:
            moved += 1 + carried + streams + readers + streams + arrived + carried + 1 + 1 + carried
    return moved
