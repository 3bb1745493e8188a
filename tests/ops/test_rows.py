"""Rows of tensors of any layout."""

from __future__ import annotations

import pytest
import torch

from darlit import pathways
from darlit.ops import cpu
from darlit.ops.rows import dense, rows


@pytest.mark.parametrize("take", [dense, rows])
@pytest.mark.parametrize("shape", [(2, 1, 1), (3, 1, 8), (1, 1, 8), (3, 5, 8), (2, 5, 1)])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_the_second_last_stride_is_the_distance_of_rows(take, shape, order) -> None:
    """One token a sequence: PyTorch calls such a tensor contiguous whatever the stride of its tokens."""
    stored = torch.arange(float(torch.Size(shape).numel())).reshape([shape[i] for i in order])
    x_BTD = stored.permute([order.index(i) for i in range(3)])
    taken = take(x_BTD)
    width = shape[-1]
    found = torch.as_strided(taken, (x_BTD.numel() // width, width), (taken.stride(-2), 1), taken.storage_offset())
    assert torch.equal(found, x_BTD.reshape(-1, width))


@pytest.mark.parametrize("shape", [(2, 1, 1), (3, 1, 8)])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("attnres", {"query_init_std": 0.5}),
        ("dar", {"query_init_std": 0.5}),
        ("dar", {"block_size": 2, "gates": "dynamic", "query_init_std": 0.5}),
        ("hyper_connections", {}),
        ("mhc", {}),
    ],
)
@pytest.mark.skipif(not cpu.supports("cpu", torch.float32), reason="needs a C++ compiler")
def test_one_token_with_any_stride_is_read_and_written_right(name, options, shape) -> None:
    """A wrong distance of rows would read and write beyond the tensors."""

    def strided(x_BTD: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x_BTD.clone(), shape, (shape[-1], 7 * x_BTD.numel(), 1)).requires_grad_()

    values = [torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number in range(5)]
    found = []
    for implementation in ("reference", "cpu"):
        torch.manual_seed(0)
        pathway = pathways.build(name, num_branches=4, width=shape[-1], implementation=implementation, **options)
        for parameter in pathway.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        leaves = [strided(value) for value in values]
        state = pathway.start(leaves[0])
        reads = []
        for branch, output in enumerate(leaves[1:]):
            reads.append(state.read(branch))
            state.write(branch, output)
        reads.append(state.finish())
        loss = sum((read * torch.arange(1.0, 1 + read.numel()).view(shape)).sum() for read in reads)
        found.append([*reads, *torch.autograd.grad(loss, [*leaves, *pathway.parameters()])])
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).norm() <= 1e-4 * expected.norm() + 1e-6
