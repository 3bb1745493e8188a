"""DAR. No independent code of it is public: its equations, written here densely on their own, and golden tensors."""

from __future__ import annotations

import pytest
import torch

from darlit.bench.dense import Dense
from darlit.pathways import Probe, build
from pathways.cases import BRANCHES, WIDTH, as_double, assert_same, drive, make, plain_branches, randn, stir

EPS = 1e-6
CASES = {
    "full": {},
    "block": {"block_size": 2},
    "uneven": {"block_size": 3},
    "one_block": {"block_size": 4},
    "self_kv": {"route": "self_kv"},
    "cross_v": {"route": "cross_v"},
    "fixed_kv": {"route": "fixed_kv", "query_init_std": 0.02},
    "dynamic": {"gates": "dynamic"},
    "dynamic_block": {"gates": "dynamic", "block_size": 2},
    "no_partial": {"block_size": 2, "include_partial": False},
    "no_partial_dynamic": {"block_size": 2, "include_partial": False, "gates": "dynamic"},
    "carry": {"carry_partial": True},
    "carry_block_dynamic": {"carry_partial": True, "block_size": 3, "gates": "dynamic"},
}


@pytest.mark.parametrize("case", CASES)
def test_dar_equals_its_dense_formula(case):
    pathway = stir(as_double(build("dar", num_branches=BRANCHES, width=WIDTH, norm_eps=EPS, **CASES[case])))
    embedding = randn(2, 5, WIDTH, seed=1).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    ours, theirs = drive(pathway, embedding, branches), drive(Dense(pathway), embedding, branches)
    assert_same([*ours[0], ours[1]], [*theirs[0], theirs[1]], [*pathway.parameters(), embedding, *weights])


def test_forced_swap_of_two_streams():
    """Transport computed but not applied. rho = 0 exchanges the streams of the partial."""
    pathway, seen = make("dar_full"), {}
    with torch.no_grad():
        pathway.beta.logit_GO[0].copy_(torch.tensor([-60.0, 60.0]))
        pathway.rho.logit_GO[pathway.rho.slot[1]].fill_(-60.0)

    class Streams(Probe):
        def source(self, depth, stream, value_BTD):
            seen[depth, stream] = value_BTD[0, 0, 0].item()
            return value_BTD

    branches = [torch.ones_like, *[torch.zeros_like] * (BRANCHES - 1)]
    drive(pathway, torch.zeros(1, 1, WIDTH, dtype=torch.double), branches, Streams())
    assert [seen[1, 0], seen[1, 1]] == pytest.approx([2, 0], abs=1e-9)


def test_full_dar_that_hides_the_partial_warns():
    with pytest.warns(UserWarning, match="include_partial=False with block_size=1"):
        build("dar", num_branches=BRANCHES, width=WIDTH, include_partial=False)


def test_cross_v_is_dar_with_its_two_targets_renamed():
    """Target j of one is target 1 - j of the other: swap the queries and alpha, and nothing else is left."""
    torch.manual_seed(3)
    options = {"num_branches": 6, "width": 12, "implementation": "reference"}
    dar = build("dar", **options).double()
    cross_v = build("dar", route="cross_v", **options).double()
    with torch.no_grad():
        for parameter in dar.parameters():
            parameter.normal_()
        cross_v.load_state_dict(dar.state_dict())
        cross_v.queries_JRD.copy_(dar.queries_JRD.flip(0))
        cross_v.alpha.logit_GO.neg_()
    outputs = torch.randn(7, 2, 5, 12, dtype=torch.float64)
    states = [pathway.start(outputs[6]) for pathway in (dar, cross_v)]
    for branch in range(6):
        torch.testing.assert_close(states[0].read(branch), states[1].read(branch), rtol=1e-12, atol=1e-12)
        for state in states:
            state.write(branch, outputs[branch])
    torch.testing.assert_close(states[0].finish(), states[1].finish(), rtol=1e-12, atol=1e-12)
