"""Block reads in two phases: deep histories against the oracle, and where it runs.

The CPU kernels always; the Triton kernels where this file runs in Triton's interpreter, see `test_triton_interpreted`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from darlit import pathways
from darlit.bench.measure import saved_bytes
from darlit.ops import depth
from darlit.ops.depth import prefetch_pays
from darlit.ops.dispatch import backend
from ops import drawn_cases
from ops.drawn_cases import INTERPRETED, NARROW
from pathways.cases import token_batch, transformer

IMPLEMENTATION = "triton" if INTERPRETED else "cpu"
EXAMPLES = 4 if INTERPRETED else 24
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture
def phases(monkeypatch):
    """What ran: (P reads, S sources) of every first phase, and the sources of every read."""
    seen = SimpleNamespace(first=[], reads=[])
    kernels = backend(IMPLEMENTATION)
    mixes, read = kernels.depth_prefetch, kernels.depth_read

    def spy_mixes(addresses, count, reads, *rest):
        seen.first.append((len(reads), count))
        return mixes(addresses, count, reads, *rest)

    def spy_read(addresses, count, merged, partial, *rest):
        seen.reads.append(count + (partial is not None))
        return read(addresses, count, merged, partial, *rest)

    monkeypatch.setattr(kernels, "depth_prefetch", spy_mixes)
    monkeypatch.setattr(kernels, "depth_read", spy_read)
    return seen


drawn_histories = pytest.mark.skipif(INTERPRETED, reason="minutes each; test_every_kind_of_read runs")


def check_deep(case, dtype, phases):
    phases.first.clear()
    drawn_cases.check(case, IMPLEMENTATION, dtype)
    assert phases.first


@drawn_histories
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=CHECKS)
@given(case=drawn_cases.cases(deep=True))
def test_deep_histories_in_float32(phases, case):
    check_deep(case, torch.float32, phases)


@drawn_histories
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=EXAMPLES // 3, deadline=None, suppress_health_check=CHECKS)
@given(case=drawn_cases.cases(deep=True))
def test_deep_histories_in_narrow_types(phases, case, dtype):
    check_deep(case, dtype, phases)


CASES = {
    "dar": ("dar", {}),
    "self_kv": ("dar", {"route": "self_kv"}),
    "cross_v, dynamic": ("dar", {"route": "cross_v", "gates": "dynamic"}),
    "fixed_kv": ("dar", {"route": "fixed_kv", "query_init_std": 0.02}),
    "carried": ("dar", {"carry_partial": True}),
    "no partial": ("dar", {"include_partial": False}),
    "attnres": ("attnres", {}),
    "sep_v": ("attnres", {"sep_v": True}),
    "two queries": ("attnres", {"num_queries": 2, "query_init_std": 0.02}),
    "three queries": ("attnres", {"num_queries": 3, "query_init_std": 0.02}),
}


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_read(name, dtype, phases):
    family, options = CASES[name]
    shape = (1, 1, 24) if INTERPRETED else (2, 7, 200)
    branches = 40 if name == "three queries" else 24  # six blocks; three targets need nine of these
    case = {"name": family, "options": {"block_size": 2, **options}, "num_branches": branches, "shape": shape}
    check_deep({**case, "layout": "contiguous", "seed": 5, "parameter_std": 0.1}, dtype, phases)


# By hand: S sources, the embedding one, give 1 + V (S - 1) tensors. Blocks of P = 4 reads.
# V = J = 2: 4 (2 S - 1) > 2 S - 1 + 16 from S = 4 on. V = 1, J = 2: 4 S > S + 16 from 6. J = 1: 4 S > S + 8 from 3.
FIRST_SOURCES = {"dar": 4, "fixed_kv": 6, "no partial": 4, "attnres": 3, "sep_v": 3, "two queries": 6}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", FIRST_SOURCES)
def test_two_phases_run_where_they_move_less(name, training, phases):
    family, options = CASES[name]
    pathway = pathways.build(
        family, num_branches=30, width=8, block_size=2, implementation=IMPLEMENTATION, **options
    )  # seven blocks of four branches, one of two
    with torch.set_grad_enabled(training):
        drive(pathway, torch.randn(1, 2, 8, requires_grad=True))
    begin = FIRST_SOURCES[name]
    # The last block has two branches: 2 S > S + 4 J.
    last = [] if name in ("fixed_kv", "two queries") else [(2, 8)]
    assert phases.first == [(4, sources) for sources in range(begin, 8)] + last
    expected = []
    for read in range(4 if name == "no partial" else 1, 30):
        completed = 1 + read // 4
        merged = begin <= completed < 8 or (completed == 8 and last)
        expected.append((1 if merged else completed) + (read % 4 > 0 and name != "no partial"))
    assert phases.reads == [*expected, 9]


@pytest.mark.parametrize("case", ["reference", "full", "one block", "two blocks"])
def test_one_phase_runs_where_two_move_no_less(case, phases):
    """Of AttnRes-Full every entry serves one read before the next; of few blocks there is little to read."""
    name, options = {
        "reference": ("dar", {"block_size": 1, "implementation": "reference"}),
        "full": ("attnres", {"block_size": 0}),
        "one block": ("dar", {"block_size": 15}),
        "two blocks": ("dar", {"block_size": 8}),
    }[case]
    pathway = pathways.build(name, num_branches=30, width=8, **{"implementation": IMPLEMENTATION, **options})
    drive(pathway, torch.randn(1, 2, 8))
    assert not phases.first
    assert len(phases.reads) == (0 if case == "reference" else 30)


@given(st.integers(0, 64), st.integers(1, 65), st.sampled_from([(1, 1), (2, 2), (1, 2), (1, 3)]))
def test_the_rule_counts_what_moves(reads, sources, kind):
    values, targets = kind
    completed = [("embedding",)] + [(s, v) for s in range(1, sources) for v in range(values)]
    mixes = [(read, target) for read in range(reads) for target in range(targets)]
    one = [tensor for _ in range(reads) for tensor in completed]
    two = completed + mixes + mixes
    assert prefetch_pays(reads, sources, values, targets) == (len(two) < len(one))


def drive(pathway, x, weights=None, recompute=False):
    """A layer is two branches; with ``recompute`` its activations are made again in the backward pass."""

    def layer(state, first):
        for branch in (first, first + 1):
            read = state.read(branch)
            state.write(branch, torch.tanh(read if weights is None else read @ weights[branch]))
        return state

    state = pathway.start(x)
    for first in range(0, pathway.num_branches, 2):
        if recompute:
            state = checkpoint(lambda state, at: layer(state.fork(), at), state, first, use_reentrant=False)
        else:
            state = layer(state, first)
    return state.finish()


def results(pathway, run=drive, **options):
    """The hidden state, and the gradients of all that went in."""
    generator = torch.Generator().manual_seed(0)
    width, branches = pathway.width, pathway.num_branches
    for parameter in pathway.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    x = torch.randn(2, 5, width, generator=generator).requires_grad_()
    weights = [(torch.randn(width, width, generator=generator) / width**0.5).requires_grad_() for _ in range(branches)]
    hidden = run(pathway, x, weights, **options)
    return [hidden, *torch.autograd.grad(hidden.square().sum(), [x, *weights, *pathway.parameters()])]


def build(name):
    family, options = CASES[name]
    return pathways.build(family, num_branches=16, width=24, block_size=2, implementation=IMPLEMENTATION, **options)


def assert_close(ours, theirs, tolerance):
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("name", ["dar", "attnres"])
def test_training_and_evaluation_agree(name, phases):
    pathway, x = build(name), torch.randn(2, 5, 24, requires_grad=True)
    hidden = drive(pathway, x)
    with torch.no_grad():
        assert torch.equal(drive(pathway, x), hidden)
    assert phases.first


@pytest.mark.parametrize("name", ["dar", "attnres"])
def test_recomputation_takes_one_phase_and_changes_nothing(name, phases):
    plain = results(build(name))
    assert phases.first
    phases.first.clear()
    again = results(build(name), recompute=True)
    assert not phases.first
    assert_close(again, plain, 1e-5)


@pytest.mark.parametrize("name", ["dar", "attnres"])
def test_a_fork_has_no_mixes_and_its_origin_keeps_them(name, phases):
    pathway, x = build(name), torch.randn(1, 3, 24)
    state = pathway.start(x)
    for branch in range(14):  # within the fourth block
        state.write(branch, torch.tanh(state.read(branch)))
    assert state.history.prefetched is not None
    phases.reads.clear()
    fork = state.fork()
    assert fork.history.prefetched is None
    torch.testing.assert_close(fork.read(14), state.read(14))
    assert phases.reads == [5, 2]


@pytest.mark.parametrize("name", ["dar", "attnres", "no partial"])
def test_no_mixes_are_kept_for_the_backward(name, phases, monkeypatch):
    pathway, x = build(name), torch.randn(1, 3, 24, requires_grad=True)
    two = saved_bytes(lambda: drive(pathway, x), pathway.parameters())
    assert phases.first
    monkeypatch.setattr(depth, "prefetch_pays", lambda *case: False)
    assert saved_bytes(lambda: drive(pathway, x), pathway.parameters()) == two


@pytest.mark.skipif(INTERPRETED, reason="the backbone chooses for itself")
@pytest.mark.parametrize("recompute", [True, False])
def test_the_backbone_takes_two_phases_but_where_it_recomputes(recompute, phases):
    model = transformer("dar_full", dtype=torch.float32, checkpoint_layers=recompute, num_layers=6, width=16)
    tokens = token_batch(2, 9)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert phases.first == ([] if recompute else [(2, 5), (2, 6)])
    with torch.no_grad():
        model.loss(tokens[:, :-1], tokens[:, 1:])
    assert phases.first[-2:] == [(2, 5), (2, 6)]
