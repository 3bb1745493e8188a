"""Training: streams that can separate do, streams that cannot do not, bfloat16 stays finite, exchanges move.

Shapes: B batch, T token, D width.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from darlit.ops.reference import doubly_stochastic
from darlit.pathways import Probe
from darlit.pathways.table import ARMS
from pathways.cases import VARIANTS, token_batch, transformer

STEPS = 50
SMALL = {"dtype": torch.float32, "num_layers": 2, "width": 16, "num_heads": 2, "ffn_width": 24}


class Streams(Probe):
    def __init__(self) -> None:
        self.seen: dict[int, dict[int, torch.Tensor]] = {}

    def source(self, depth, stream, value_BTD):
        self.seen.setdefault(depth, {})[stream] = value_BTD
        return value_BTD


def train(model, steps=STEPS, learning_rate=3e-3, autocast=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    losses = []
    for step in range(steps):
        tokens = token_batch(4, 17, seed=step)
        tokens = torch.where(tokens % 2 == 0, tokens, (tokens.roll(1, 1) * 3 + 1) % 97)  # half of it can be learnt
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def cosines(model) -> list[float]:
    """Mean cosine of the first two streams at every depth after the embedding."""
    probe = Streams()
    with torch.no_grad():
        model.hidden(token_batch(4, 16, seed=1000), probe)
    pairs = [streams for depth, streams in sorted(probe.seen.items()) if depth > 0]
    return [F.cosine_similarity(streams[0], streams[1], dim=-1).mean().item() for streams in pairs]


def relative_difference(model) -> float:
    probe = Streams()
    with torch.no_grad():
        model.hidden(token_batch(4, 16, seed=1000), probe)
    last = probe.seen[max(probe.seen)]
    return ((last[0] - last[1]).norm() / last[0].norm()).item()


ROUTES = [pytest.param(arm, marks=pytest.mark.slow) for arm in ("dar_self_kv", "dar_cross_v", "dar_fixed_kv")]


@pytest.mark.parametrize("arm", ["dar_full", "dar_block", *ROUTES])
def test_streams_of_dar_separate_within_fifty_steps(arm):
    model = transformer(arm, **SMALL)
    train(model)
    assert min(cosines(model)) < 0.99


def exchanges(model) -> torch.Tensor:
    """The static exchange of every branch that has one."""
    pathway = model.pathway
    return (
        pathway.res_INN.detach().clone() if pathway.name != "mhc" else doubly_stochastic(pathway.res_bias_INN.detach())
    )


@pytest.mark.parametrize("arm", ["hc2", "mhc2", pytest.param("mhc4", marks=pytest.mark.slow)])
def test_streams_of_hyper_connections_separate_within_fifty_steps(arm):
    model = transformer(arm, **SMALL)
    assert relative_difference(model) < 1e-5
    before = exchanges(model)
    train(model)
    assert relative_difference(model) > 1e-4
    moved = (exchanges(model) - before).abs().amax(dim=(-1, -2))
    assert (moved > 1e-5).all(), f"a mixing matrix frozen at its start, {moved}"


@pytest.mark.parametrize("variant", ["dar_full", "dar_block", "dar_dynamic"])
def test_symmetric_streams_of_dar_never_separate(variant):
    """Equal betas and equal queries: equal streams get equal gradients, to the last bit."""
    name, options = VARIANTS[variant]
    VARIANTS["symmetric"] = (name, {**options, "beta_asymmetry": 0.0})
    try:
        model = transformer("symmetric", **SMALL)
    finally:
        del VARIANTS["symmetric"]
    train(model, steps=15)
    assert model.pathway.queries_JRD.abs().max() > 1e-3
    assert torch.equal(model.pathway.queries_JRD[0], model.pathway.queries_JRD[1])
    probe = Streams()
    with torch.no_grad():
        model.hidden(token_batch(4, 16, seed=1000), probe)
    for streams in probe.seen.values():
        assert torch.equal(streams[0], streams[1])


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_two_hundred_steps_in_bfloat16_are_finite_and_learn(arm):
    model = transformer(arm, **{**SMALL, "num_layers": 4})
    losses = train(model, steps=200, autocast=True)
    assert all(torch.tensor(losses).isfinite())
    assert sum(losses[-10:]) / 10 < losses[0] - 0.2
    assert all(parameter.isfinite().all() for parameter in model.parameters())
