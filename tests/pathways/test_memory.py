"""What autograd keeps for a pathway, and that recomputing it changes nothing.

Shapes: B batch, T token, D width.
"""

from __future__ import annotations

import pytest
import torch

from darlit.pathways import build
from darlit.pathways.table import ARMS
from pathways.cases import VARIANTS, loss_and_gradients, randn, stir, token_batch, transformer

B, T, WIDE = 3, 7, 256


def saved_vectors(variant: str, dtype: torch.dtype, branches: int) -> tuple[float, float]:
    """What the pathway alone saves per token for the backward pass, in vectors of D channels of the streams' dtype.

    Returns tensors of D channels, each storage once, and all smaller ones. Branch outputs are made outside: they
    count once each where a pathway keeps them. Tensors without tokens (parameters, their casts) do not count.
    """
    name, options = VARIANTS[variant]
    pathway = build(name, num_branches=branches, width=WIDE, **options)
    embedding = randn(B, T, WIDE, seed=0, dtype=dtype).requires_grad_()
    outputs = [randn(B, T, WIDE, seed=1 + i, dtype=dtype).requires_grad_() for i in range(branches)]
    large: dict[int, int] = {}
    small: dict[int, int] = {}

    def pack(tensor):
        if tensor.shape[:2] == (B, T) or tensor.shape[:1] == (B * T,):
            storage = tensor.untyped_storage()
            (large if tensor.shape[-1] == WIDE else small)[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        state = pathway.start(embedding)
        for i, output in enumerate(outputs):
            state.read(i)
            state.write(i, output)
        final = state.finish()
    assert final.requires_grad
    unit = embedding.numel() * embedding.element_size()
    return sum(large.values()) / unit, sum(small.values()) / unit


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_tensors_grow_with_the_branches_and_are_as_narrow_as_the_streams(variant):
    """A read that stacks its sources keeps a number that grows with the square of the depth."""
    wide, scalars = saved_vectors(variant, torch.float32, branches=8)
    deeper, _ = saved_vectors(variant, torch.float32, branches=16)
    narrow, _ = saved_vectors(variant, torch.bfloat16, branches=8)
    assert narrow == wide, "a bfloat16 stream is kept in float32"
    assert wide <= 5.2 * 8
    assert deeper <= 5.2 * 16
    assert scalars <= 0.2 * 8


@pytest.mark.parametrize("variant", [*ARMS, "dar_dynamic"])
def test_recomputing_every_layer_changes_no_gradient(variant):
    """History tensors live in tuples of a state, which recomputation must follow; two backward passes in a row."""
    tokens, results = token_batch(4, 17), []
    for recompute in (False, True):
        model = transformer(variant, checkpoint_layers=recompute, width=16)
        stir(model.pathway, std=0.1)
        whole = loss_and_gradients(model, model.loss, tokens)
        again = loss_and_gradients(
            model, lambda x, y, m=model: (m.loss(x[:2], y[:2]) + m.loss(x[2:], y[2:])) / 2, tokens
        )
        for got, wanted in zip(again, whole, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
        results.append(whole)
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-13)


def test_recomputing_keeps_less():
    """Otherwise the comparison above compares nothing."""
    kept = []
    for recompute in (False, True):
        model, tokens, total = transformer("dar_full", checkpoint_layers=recompute), token_batch(2, 33), 0

        def pack(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.loss(tokens[:, :-1], tokens[:, 1:])
        kept.append(total)
    assert kept[1] < 0.5 * kept[0]
