"""Rescue gain in models whose answer is known, and where the intervention reaches."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from darlit.errors import DarlitError
from darlit.probes.rescue import CORRUPTIONS, RescueCurve, corrupt, intervention, rescue_curve, summed_kl
from darlit.probes.states import Replacement, record
from probes.models import build, tokens

ALWAYS, NEVER = 1000.0, -1000.0
"""Logits whose sigmoid is exactly 1 and 0."""


def streams_apart(**options):
    """DAR whose two streams never exchange anything in a write, and keep their keys to themselves."""
    model = build("dar_full", route="self_kv", **options)
    with torch.no_grad():
        model.pathway.rho.logit_GO.fill_(ALWAYS)
    return model


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("span", ["at", "up_to"])
def test_a_stream_that_is_never_read_rescues_nothing_and_the_other_everything(corruption, span):
    model = streams_apart()
    with torch.no_grad():
        model.pathway.alpha.logit_GO.fill_(ALWAYS)  # x = h^0
    curve = rescue_curve(model, [tokens()], corruption, span)
    assert min(curve.kl_none) > 1e-3
    assert curve.depths == [1, 2, 3]
    assert curve.gains == [[1.0] * 3, [0.0] * 3]
    assert curve.kl_keep == [[0.0] * 3, curve.kl_none]
    assert curve.balance == [0.0] * 3


def test_a_dead_stream_rescues_nothing_and_the_other_everything():
    """beta^1 = 0: stream 1 is zero after the embedding, so corrupting it changes nothing and keeping it neither."""
    model = streams_apart()
    with torch.no_grad():
        model.pathway.beta.logit_GO[:, 1] = NEVER
    curve = rescue_curve(model, [tokens()])
    assert min(curve.kl_none) > 1e-3
    assert curve.gains == [[1.0] * 3, [0.0] * 3]


def mirror(model):
    """Swap the two streams: queries and betas by stream, alpha to 1 - alpha; rho is symmetric."""
    pathway = model.pathway
    with torch.no_grad():
        pathway.queries_JRD.copy_(pathway.queries_JRD.flip(0))
        pathway.beta.logit_GO.copy_(pathway.beta.logit_GO.flip(-1))
        pathway.alpha.logit_GO.neg_()
    return model


@pytest.mark.parametrize("route", ["dar", "self_kv", "cross_v"])
def test_a_mirrored_model_has_mirrored_gains(route):
    curve = rescue_curve(build("dar_full", route=route), [tokens()], span="up_to")
    mirrored = rescue_curve(mirror(build("dar_full", route=route)), [tokens()], span="up_to")
    torch.testing.assert_close(torch.tensor(mirrored.gains), torch.tensor(curve.gains[::-1]), rtol=0, atol=1e-9)
    assert any(abs(a - b) > 1e-3 for a, b in zip(*curve.gains, strict=True)), "the streams should differ"


def test_streams_that_mirror_each_other_gain_alike():
    model = build("dar_full", noise=0.0, beta_asymmetry=0.0)
    with torch.no_grad():
        model.pathway.queries_JRD.copy_(torch.randn_like(model.pathway.queries_JRD[:1]).expand(2, -1, -1))
    curve = rescue_curve(model, [tokens()])
    torch.testing.assert_close(torch.tensor(curve.gains[0]), torch.tensor(curve.gains[1]), rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.tensor(curve.balance), torch.ones(3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("arm", ["dar_full", "dar_block", "mhc2", "mhc4"])
def test_the_identity_changes_nothing(arm):
    model, ids = build(arm), tokens()
    clean = record(model, ids)
    for depth in range(3):
        states = intervention(clean, clean, depth, None, "up_to")
        with torch.no_grad():
            hidden = model.hidden(ids, Replacement(states))
            assert summed_kl(model, model.hidden(ids, Replacement({})), hidden) == 0.0


def test_the_span_says_which_depths_are_corrupted():
    places = [(depth, stream) for depth in range(4) for stream in range(2)]
    clean = {place: torch.tensor([float(i)]) for i, place in enumerate(places)}
    corrupted = {place: -state for place, state in clean.items()}
    at = intervention(clean, corrupted, 2, kept=1, span="at")
    assert at == {(2, 0): corrupted[2, 0], (2, 1): clean[2, 1]}
    up_to = intervention(clean, corrupted, 1, kept=None, span="up_to")
    assert up_to == {place: corrupted[place] for place in places if place[0] <= 1}


def test_corruptions():
    state_BTD = tokens(3, 4).double()[..., None] * torch.tensor([1.0, 2.0], dtype=torch.double)
    assert torch.equal(corrupt(state_BTD, "sequence")[1], state_BTD[0])
    assert torch.equal(corrupt(state_BTD, "zero"), torch.zeros_like(state_BTD))
    torch.testing.assert_close(corrupt(state_BTD, "mean")[2, 3], state_BTD.mean((0, 1)))
    with pytest.raises(DarlitError, match="has only one; give 2 or more"):
        corrupt(state_BTD[:1], "sequence")


def test_divergence_is_that_of_the_next_token():
    model, ids = build("dar_full"), tokens()
    with torch.no_grad():
        clean, other = model.hidden(ids), model.hidden(ids.flip(0))
        p, q = (F.softmax(F.linear(h, model.head_weight), -1) for h in (clean, other))
    assert summed_kl(model, clean, other) == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-10)
    assert summed_kl(model, clean, other) > 1


def test_sums_over_batches_are_means_over_tokens():
    model, first, second = build("mhc2"), tokens(2), tokens(2, seed=5)
    both, one, two = (rescue_curve(model, batches) for batches in ([first, second], [first], [second]))
    assert both.tokens == 48
    for mean, a, b in zip(both.kl_none, one.kl_none, two.kl_none, strict=True):
        assert mean == pytest.approx((a + b) / 2, rel=1e-12)


def test_gains_and_balance_where_they_are_not_defined():
    curve = RescueCurve("zero", "at", [0, 1, 2], [0.0, 1.0, 1.0], [[0.0, 1.5, 0.2], [0.0, 2.0, 1.5]], 1)
    assert math.isnan(curve.gains[0][0])
    assert math.isnan(curve.balance[1]), "no stream restores anything"
    assert curve.balance[2] == 0.0, "a negative gain counts as none"


def test_one_stream_is_refused_with_a_sentence():
    with pytest.raises(DarlitError, match=r"which of several streams .* Standard residual has one"):
        rescue_curve(build("residual"), [tokens()])
