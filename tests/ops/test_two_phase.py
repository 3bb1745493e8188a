"""Block reads in two phases: the operator against its formula, deep histories against the oracle, and where it runs.

The CPU kernels always; the Triton kernels where this file runs in Triton's interpreter, see `test_triton_interpreted`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from darlit.ops.layout import backend
from darlit.ops.two_phase import depth_mixes, two_phases_pay
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from darlit import pathways
from darlit.bench.measure import saved_bytes
from darlit.ops import two_phase
from ops import drawn_cases
from ops.drawn_cases import INTERPRETED, NARROW
from pathways.cases import token_batch, transformer

IMPLEMENTATION = "triton" if INTERPRETED else "cpu"
EXAMPLES = 4 if INTERPRETED else 24
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
TARGETS_OF = {1: [(0,), (0, 0), (0, 0, 0)], 2: [(0, 1), (1, 0), (1, 1), (0,)]}
"""Value streams by how many streams there are: AttnRes with one to three queries; the routes, and sep_v."""


@st.composite
def reads_ahead(draw):
    streams = draw(st.integers(1, 2))
    return SimpleNamespace(
        streams=streams,
        value_streams=draw(st.sampled_from(TARGETS_OF[streams])),
        sources=draw(st.integers(1, 8 if INTERPRETED else 40)),
        reads=draw(st.integers(1, 20)),
        width=draw(st.integers(1, 150)),
        tokens=draw(st.integers(1, 5)),
        wide_rows=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def check_mixes(case, dtype):
    """Against einsum in float64. Fresh memory is NaN, so an element that nobody writes shows."""
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    margin = 3 if case.wide_rows else 0
    shape = (1, case.tokens, case.width + margin)
    sources = [randn(*shape).to(dtype)[..., margin:] for _ in range(case.sources * case.streams)]
    targets, columns = len(case.value_streams), [s % 4 for s in range(case.sources)]
    logits = [3 * randn(case.tokens, targets, case.reads + s % 4 + s % 3) for s in range(case.sources)]
    torch.use_deterministic_algorithms(True)  # also fills what torch.empty returns
    try:
        *mixes, lse_NJP = depth_mixes(sources, logits, columns, case.reads, list(case.value_streams), IMPLEMENTATION)
    finally:
        torch.use_deterministic_algorithms(False)

    table_NJPS = torch.stack(
        [table[..., c : c + case.reads] for table, c in zip(logits, columns, strict=True)], dim=-1
    ).double()
    torch.testing.assert_close(lse_NJP.double(), table_NJPS.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert len(mixes) == case.reads * targets
    for i, mix in enumerate(mixes):
        read, target = divmod(i, targets)
        values_SND = torch.cat(sources[case.value_streams[target] :: case.streams]).double()
        exact_ND = torch.einsum("ns,snd->nd", table_NJPS[:, target, read].softmax(-1), values_SND)
        assert mix.dtype == dtype
        error = (mix[0].double() - exact_ND).norm() / exact_ND.norm().clamp(min=exact_ND.numel() ** 0.5 * 1e-2)
        assert error <= drawn_cases.TOLERANCE[dtype], f"read {read}, target {target}: {error:.1e}"


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=CHECKS)
@given(case=reads_ahead())
def test_mixes_in_float32(case):
    check_mixes(case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=CHECKS)
@given(case=reads_ahead())
def test_mixes_in_narrow_types(case, dtype):
    check_mixes(case, dtype)


def test_mixes_of_130_sources():
    case = SimpleNamespace(streams=2, value_streams=(0, 1), sources=130, reads=2, width=20, tokens=3)
    case.wide_rows, case.seed = True, 0
    check_mixes(case, torch.float32)


@pytest.mark.parametrize("width", [768, 1027] + ([] if INTERPRETED else [4096]))
@pytest.mark.parametrize("reads", [2, 5, 17])
def test_mixes_of_wide_rows(width, reads):
    """More than one program a row, and rows that are written past the caches."""
    tokens = 2 if INTERPRETED else 1 + 2**20 // width // 4
    case = SimpleNamespace(streams=2, value_streams=(1, 0), sources=3, reads=reads, width=width, tokens=tokens)
    case.wide_rows, case.seed = False, width
    check_mixes(case, torch.float32)


@pytest.fixture
def phases(monkeypatch):
    """What ran: (P reads, S sources) of every first phase, and the sources of every read."""
    seen = SimpleNamespace(first=[], reads=[])
    kernels = backend(IMPLEMENTATION)
    mixes, read = kernels.depth_mixes, kernels.depth_read

    def spy_mixes(sources, logits, columns, value_streams, outputs, lse_NJP):
        seen.first.append((lse_NJP.shape[2], len(logits)))
        return mixes(sources, logits, columns, value_streams, outputs, lse_NJP)

    def spy_read(sources, logits, *rest):
        seen.reads.append(len(logits))
        return read(sources, logits, *rest)

    monkeypatch.setattr(kernels, "depth_mixes", spy_mixes)
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
    assert two_phases_pay(reads, sources, values, targets) == (len(two) < len(one))


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
    assert state.history.ahead is not None
    phases.reads.clear()
    fork = state.fork()
    assert fork.history.ahead is None
    torch.testing.assert_close(fork.read(14), state.read(14))
    assert phases.reads == [5, 2]


@pytest.mark.parametrize("name", ["dar", "attnres", "no partial"])
def test_no_mixes_are_kept_for_the_backward(name, phases, monkeypatch):
    pathway, x = build(name), torch.randn(1, 3, 24, requires_grad=True)
    two = saved_bytes(lambda: drive(pathway, x), pathway.parameters())
    assert phases.first
    monkeypatch.setattr(two_phase, "two_phases_pay", lambda *case: False)
    assert saved_bytes(lambda: drive(pathway, x), pathway.parameters()) == two


@pytest.mark.skipif(INTERPRETED, reason="compilation is PyTorch's, whatever the kernels")
@pytest.mark.parametrize("name", ["dar", pytest.param("attnres", marks=pytest.mark.slow)])
def test_compiled_in_one_graph(name):
    plain = results(build(name))
    compiled = results(build(name), torch.compile(drive, backend="aot_eager", fullgraph=True))
    assert_close(compiled, plain, 1e-5)


@pytest.mark.skipif(INTERPRETED, reason="a schema is the same for all kernels")
def test_the_operator_declares_what_it_does():
    streams, logits = [torch.randn(1, 3, 8) for _ in range(4)], [torch.randn(3, 2, 5) for _ in range(2)]
    arguments = (streams, logits, [0, 2], 3, [1, 0], "cpu")
    torch.library.opcheck(depth_mixes, arguments, test_utils=("test_schema", "test_faketensor"))


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
