"""Transparent attention against x-transformers' layer integration, DenseFormer against its formula as one matrix."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from x_transformers.x_transformers import DynamicLIMe

from pathways.cases import BRANCHES, WIDTH, assert_same, drive, make, plain_branches, randn, stir

LAYERS = BRANCHES // 2


def outside(mix, embedding, branches):
    """Layers with standard residuals; ``mix(layer, outputs)`` gives the next layer's input."""
    x, outputs, inputs = embedding, [embedding], []
    for layer in range(1, LAYERS + 1):
        for branch in branches[2 * layer - 2 : 2 * layer]:
            inputs.append(x)
            x = x + branch(x)
        outputs.append(x)
        x = mix(layer, outputs)
    return inputs, x


def test_transparent_equals_x_transformers():
    """`DynamicLIMe` mixes layer outputs by a softmax of a linear map; without its weight the bias alone decides."""
    pathway = stir(make("transparent"))
    embedding = randn(2, 5, WIDTH, seed=1).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    first = [0, 2, 5, 9]

    def mix(layer, outputs):
        integrate = DynamicLIMe(WIDTH, num_layers=layer + 1).double()
        names = dict(integrate.named_parameters())
        (weight,) = (name for name in names if name.endswith("weight"))
        (bias,) = (name for name in names if name.endswith("bias"))
        logits = pathway.weights_W[first[layer - 1] : first[layer - 1] + layer + 1]
        parameters = {**names, weight: torch.zeros_like(names[weight]), bias: logits}
        return functional_call(integrate, parameters, (outputs[-1], outputs))

    ours, theirs = drive(pathway, embedding, branches), outside(mix, embedding, branches)
    assert_same([*ours[0], ours[1]], [*theirs[0], theirs[1]], [pathway.weights_W, embedding, *weights])


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)])
def test_denseformer_equals_its_dense_formula(dilation, period):
    """No independent package has it: a full matrix A, zero where the paper connects nothing; golden tensors as well."""
    pathway = stir(make("denseformer", dilation=dilation, period=period))
    embedding = randn(2, 5, WIDTH, seed=1).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    mixed = [i for i in range(1, LAYERS + 1) if i % period == 0]
    places = [(i, j) for i in mixed for j in range(i + 1) if (i - j) % dilation == 0]
    assert len(places) == pathway.weights_W.numel()
    dense = torch.zeros(LAYERS + 1, LAYERS + 1, dtype=torch.double)
    dense = dense.index_put(tuple(torch.tensor(places).T), pathway.weights_W)

    def mix(layer, outputs):
        if layer not in mixed:
            return outputs[-1]
        return torch.einsum("j,jbtd->btd", dense[layer, : layer + 1], torch.stack(outputs))

    ours, theirs = drive(pathway, embedding, branches), outside(mix, embedding, branches)
    assert_same([*ours[0], ours[1]], [*theirs[0], theirs[1]], [pathway.weights_W, embedding, *weights])


def test_residual_equals_the_running_sum():
    embedding, (branches, _) = randn(2, 5, WIDTH, seed=1), plain_branches(BRANCHES)
    inputs, final, _ = drive(make("residual"), embedding, branches)
    wanted = outside(lambda layer, outputs: outputs[-1], embedding, branches)
    assert all(torch.equal(got, x) for got, x in zip([*inputs, final], [*wanted[0], wanted[1]], strict=True))
