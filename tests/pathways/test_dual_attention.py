"""DAR. No independent code of it is public: its equations, written here densely on their own, and golden tensors."""

from __future__ import annotations

import pytest
import torch

from darlit.pathways import Probe, build
from pathways.cases import BRANCHES, WIDTH, as_double, assert_same, drive, make, plain_branches, randn, stir

EPS = 1e-6
ROUTES = {  # target stream j: (stream of the keys, stream of the values)
    "dar": lambda j: (1 - j, j),
    "self_kv": lambda j: (j, j),
    "cross_v": lambda j: (j, 1 - j),
    "fixed_kv": lambda j: (0, 1),
}


def rms(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def dense(pathway, embedding, branches):
    """H [2, S, B, T, D] by streams and sources; everything is stacked again for every read."""
    options, total = pathway.options, len(branches)
    per_block = 2 * options.block_size
    history, partial = [torch.stack([embedding, embedding])], None
    first_choice = 1 if options.include_partial else min(per_block, total)

    def gate(name, branch, features):
        module = getattr(pathway, name)
        logit = module.logit_GO[module.slot[branch]]
        if options.gates == "dynamic":
            logit = logit + torch.einsum("btd,od->bto", features, module.projection_GOD[module.slot[branch]])
        return torch.sigmoid(logit)

    def read(i):
        sources = history + ([partial] if partial is not None and options.include_partial else [])
        states = torch.stack(sources, dim=1)
        if i < first_choice:
            assert states.shape[1] == 1
            return states[0, 0]
        streams = []
        for j in (0, 1):
            key, value = ROUTES[options.route](j)
            logits = torch.einsum("d,sbtd->sbt", pathway.queries_JRD[j, i - first_choice], rms(states[key]))
            streams.append(torch.einsum("sbt,sbtd->btd", logits.softmax(0), states[value]))
        alpha = gate("alpha", i, rms(sources[-1].mean(0)))
        return alpha * streams[0] + (1 - alpha) * streams[1]

    inputs = []
    for i, branch in enumerate(branches):
        inputs.append(read(i))
        beta = 2 * gate("beta", i, rms(inputs[-1]))
        added = torch.stack([beta[..., j : j + 1] * branch(inputs[-1]) for j in (0, 1)])
        if partial is None and options.carry_partial:
            partial = history[-1]
        if partial is not None:
            if i in pathway.rho.slot:
                rho = gate("rho", i, rms(inputs[-1]))
                partial = rho * partial + (1 - rho) * partial.flip(0)
            partial = partial + added
        else:
            partial = added
        if (i + 1) % per_block == 0 or i + 1 == total:
            history, partial = [*history, partial], None
    return inputs, read(total)


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
    ours, theirs = drive(pathway, embedding, branches), dense(pathway, embedding, branches)
    assert_same([*ours[0], ours[1]], [*theirs[0], theirs[1]], [*pathway.parameters(), embedding, *weights])


def test_forced_swap_of_two_streams():
    """The kind of R1: the transport computed and then dropped. rho = 0 exchanges the streams of the partial."""
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
