"""torch.compile gives what eager gives, in every arm; twelve layers of Full, each with another history, stay
below the recompilation limit.

Compiled per block means every branch for itself, with the pathway between them in eager mode: one graph serves all
layers, since a branch never sees how long the history is. A whole model is one graph.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from darlit.pathways.table import ARMS
from pathways.cases import loss_and_gradients, stir, token_batch, transformer

pytestmark = pytest.mark.slow
FULL = ("attnres_full", "dar_full")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Reaching the recompile limit is an error here, not a silent return to eager mode."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def model_of(arm: str, num_layers: int):
    model = transformer(arm, dtype=torch.float32, num_layers=num_layers, width=16, num_heads=2, ffn_width=24)
    stir(model.pathway, std=0.05)
    return model


def assert_equal_twice(model, eager, compiled):
    """Two forwards in a row, each with its own tokens, and the gradients of each."""
    for seed in (0, 1):
        tokens = token_batch(2, 9, seed=seed)
        wanted, got = loss_and_gradients(model, eager, tokens), loss_and_gradients(model, compiled, tokens)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("arm", ARMS)
def test_per_block(arm):
    layers = 12 if arm in FULL else 2
    model, reference = model_of(arm, layers), model_of(arm, layers)
    for layer in model.layers:
        layer.attention.compile(backend="aot_eager")
        layer.feed_forward.compile(backend="aot_eager")
    for seed in (0, 1):
        tokens = token_batch(2, 9, seed=seed)
        wanted = loss_and_gradients(reference, reference.loss, tokens)
        got = loss_and_gradients(model, model.loss, tokens)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-6)
    assert counters["stats"]["unique_graphs"] <= 4


@pytest.mark.parametrize("arm", ARMS)
def test_whole_model(arm):
    model = model_of(arm, num_layers=12 if arm in FULL else 2)
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    assert_equal_twice(model, model.loss, compiled)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("arm", ["attnres_full", "dar_block", "mhc4"])
def test_whole_model_with_inductor(arm):
    model = model_of(arm, num_layers=2)
    assert_equal_twice(model, model.loss, torch.compile(model.loss))
