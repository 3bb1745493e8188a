"""Tokens that are sent to experts on two ranks, in uneven ways; each rank runs `on_rank`, one process `expected`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from darlit.backbone.expert_parallel import ExpertGroup
from darlit.backbone.experts.grouped import grouped
from darlit.backbone.experts.reference import one_by_one

RANKS, EXPERTS, WIDTH, HIDDEN = 2, 4, 8, 16
ROUTES: dict[str, list[list[list[int]]]] = {
    "mixed": [[[0, 3], [1, 2], [3, 1]], [[2, 0], [2, 3], [1, 0]]],
    "each to its own": [[[0, 1], [1, 0]], [[2, 3], [3, 2]]],
    "each to the other": [[[2, 3], [3, 2]], [[0, 1], [0, 1]]],
    "all to one expert": [[[1], [1], [1]], [[1], [1], [1]]],
    "one token, and many": [[[3]], [[0], [3], [3], [2], [3]]],
}
"""Per rank and token, the experts; rank 0 holds 0 and 1."""
KINDS = {"grouped": (grouped, torch.float32), "one by one": (one_by_one, torch.float64)}


def _inputs(route: str, dtype: torch.dtype) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Per rank x, weights and experts; and the three matrices of all experts."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    matrices = [draw(EXPERTS, HIDDEN, WIDTH) for _ in range(3)]
    tokens = [torch.tensor(experts) for experts in ROUTES[route]]
    return [[draw(len(experts), WIDTH), draw(*experts.shape).sigmoid(), experts] for experts in tokens], matrices


def _run(compute: Any, x: Tensor, weights: Tensor, experts: Tensor, matrices: list[Tensor]) -> Tensor:
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
    return compute(x, weights, experts, counts, *matrices)


def on_rank(rank: int, group: Any) -> dict[str, list[Tensor]]:
    """Output, and gradients of x, weights and the local matrices, for every route and way to compute."""
    found = {}
    for kind, (compute, dtype) in KINDS.items():
        for route in ROUTES:
            ranks, matrices = _inputs(route, dtype)
            x, weights, experts = ranks[rank]
            local = [matrix.chunk(RANKS)[rank].clone() for matrix in matrices]
            leaves = [tensor.requires_grad_() for tensor in (x, weights, *local)]
            y = _run(ExpertGroup(group, compute), x, weights, experts, local)
            y.square().sum().backward()
            found[f"{route}, {kind}"] = [y.detach(), *(leaf.grad for leaf in leaves)]
    return found  # type: ignore[return-value]


def expected(route: str, kind: str) -> list[list[Tensor]]:
    """The same of both ranks, from one process that holds all experts; matrices' gradients are of the mean loss."""
    compute, dtype = KINDS[kind]
    ranks, matrices = _inputs(route, dtype)
    for tensor in (*matrices, *(tensor for x, weights, _ in ranks for tensor in (x, weights))):
        tensor.requires_grad_()
    outputs = [_run(compute, *tokens, matrices) for tokens in ranks]
    sum(y.square().sum() for y in outputs).backward()  # type: ignore[union-attr]
    return [
        [y.detach(), x.grad, weights.grad, *(matrix.grad.chunk(RANKS)[rank] / RANKS for matrix in matrices)]
        for rank, (y, (x, weights, _)) in enumerate(zip(outputs, ranks, strict=True))
    ]  # type: ignore[list-item, union-attr]
