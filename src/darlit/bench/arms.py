"""What is measured: pathways by the names that the table prints, driven without any branch between read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from darlit import pathways
from darlit.catalog import arm


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
    """How many ``[N, D]`` tensors the fused algorithm must move, forward and backward; None: no floor derived."""
    cost = build(arm, Shape(width=1, layers=layers)).cost()
    return None if cost is None else cost.step
