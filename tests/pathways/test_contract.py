"""What every pathway owes its caller: the four methods, rejected input, causality, gradients, and an honest cost."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from darlit.pathways import Pathway, Probe, build
from darlit.pathways.table import ARMS
from pathways.cases import BRANCHES, VARIANTS, WIDTH, as_double, drive, gradients, make, plain_branches, randn, stir

FAMILIES = ("residual", "transparent", "denseformer", "attnres", "hyper_connections", "mhc", "dar")


def started(name: str, dtype: torch.dtype = torch.float32):
    return build(name, num_branches=4, width=WIDTH).start(randn(1, 2, WIDTH, seed=0, dtype=dtype))


@pytest.mark.parametrize("name", FAMILIES)
class TestDoors:
    def test_every_option_has_a_default(self, name):
        assert isinstance(build(name, num_branches=4, width=WIDTH), Pathway)

    def test_an_odd_number_of_branches_and_a_single_one(self, name):
        for number in (1, 2, 3):
            pathway, branches = build(name, num_branches=number, width=WIDTH), plain_branches(number)[0]
            assert drive(pathway, randn(1, 2, WIDTH, seed=0, dtype=torch.float32), branches)[1].isfinite().all()

    def test_out_of_order(self, name):
        state = started(name)
        with pytest.raises(IndexError, match=r"read\(1\) out of order: branch 0 of 4"):
            state.read(1)
        with pytest.raises(IndexError, match=r"write\(0\) before read\(0\)"):
            state.write(0, state.embedding_BTD)
        with pytest.raises(IndexError, match=r"finish\(\) after 0 of 4"):
            state.finish()
        for i in range(4):
            state.write(i, state.read(i))
        with pytest.raises(IndexError, match=r"read\(4\) out of order"):
            state.read(4)

    def test_an_output_of_another_shape_or_dtype(self, name):
        state = started(name)
        state.read(0)
        with pytest.raises(ValueError, match=r"branch 0 returned \(1, 3, 16\) torch.float32, .* \(1, 2, 16\)"):
            state.write(0, torch.zeros(1, 3, WIDTH))
        with pytest.raises(ValueError, match=r"torch.float64, its pathway carries \(1, 2, 16\) torch.float32"):
            state.write(0, torch.zeros(1, 2, WIDTH, dtype=torch.float64))

    def test_autocast_may_narrow_an_output(self, name):
        state = started(name)
        with torch.autocast("cpu", torch.bfloat16):
            state.write(0, state.read(0).bfloat16())
            assert state.read(1).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dual", {}, r"pathway='dual' is not known; choose one of attnres, .*dar"),
        ("dar", {"rout": "dar"}, r"rout='dar': dar has no such option; it has block_size, route"),
        ("dar", {"route": "self"}, r"route='self' is not allowed; route must be dar, self_kv, cross_v, fixed_kv"),
        ("dar", {"route": "fixed_kv"}, r"query_init_std=0\.0 is not allowed; .*set query_init_std"),
        ("dar", {"block_size": 0}, r"block_size=0 is not allowed; block_size must be the layers of a block, 1"),
        ("dar", {"block_size": 5}, r"block_size=5 is not allowed; block_size must be 1 to 4"),
        ("dar", {"gates": "none"}, r"gates='none' is not allowed; gates must be static, dynamic"),
        ("dar", {"beta_asymmetry": 1.0}, r"beta_asymmetry=1\.0 is not allowed"),
        ("dar", {"beta_pattern": "head"}, r"beta_pattern must be layer, branch"),
        ("dar", {"query_init_std": -1.0}, r"query_init_std=-1\.0 is not allowed; query_init_std must be at least 0"),
        ("attnres", {"block_size": 5}, r"block_size=5 is not allowed; block_size must be 0 to 4"),
        ("attnres", {"block_size": -1}, r"block_size=-1 is not allowed"),
        ("attnres", {"num_queries": 0}, r"num_queries=0 is not allowed; num_queries must be at least 1"),
        ("attnres", {"num_queries": 2}, r"equal queries never separate: set query_init_std"),
        ("denseformer", {"dilation": 0}, r"dilation=0 is not allowed; dilation must be at least 1"),
        ("denseformer", {"dilation": 5}, r"dilation=5 is not allowed; dilation must be 1 to 4"),
        ("denseformer", {"period": 0}, r"period=0 is not allowed"),
        ("denseformer", {"period": 5}, r"period must be 1 to 4"),
        ("hyper_connections", {"num_streams": 0}, r"num_streams=0 is not allowed; num_streams must be at least 1"),
        ("hyper_connections", {"connections": "both"}, r"connections must be static, dynamic"),
        ("hyper_connections", {"dynamic_scale": 0.0}, r"dynamic_scale must be above 0"),
        ("hyper_connections", {"connections": "static", "dynamic_scale": 0.1}, r"nothing to scale"),
        ("mhc", {"num_streams": 0}, r"num_streams=0 is not allowed; num_streams must be at least 1"),
        ("mhc", {"read_share": 1.0}, r"read_share must be above 0 and below 1"),
        ("mhc", {"dynamic_scale": -0.1}, r"dynamic_scale must be above 0"),
        ("mhc", {"res_logit": float("inf")}, r"res_logit must be a finite number"),
        ("residual", {"num_branches": 0}, r"num_branches=0 is not allowed; num_branches must be at least 1"),
        ("residual", {"width": 0}, r"width=0 is not allowed; width must be at least 1"),
    ],
)
def test_bad_options_are_refused_in_one_line(name, options, message):
    with pytest.raises(ValueError, match=message) as refusal:
        build(name, **{"num_branches": BRANCHES, "width": WIDTH, **options})
    assert "\n" not in str(refusal.value)


class Run(torch.nn.Module):
    def __init__(self, pathway: Pathway) -> None:
        super().__init__()
        self.pathway = pathway

    def forward(self, embedding: Tensor, branches) -> Tensor:
        return drive(self.pathway, embedding, branches)[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant):
    """With respect to the embedding, the branches' weights and every parameter, as one long vector."""
    pathway = stir(make(variant, width=3))
    names = [f"pathway.{name}" for name, _ in pathway.named_parameters()]
    leaves = [randn(1, 2, 3, seed=9), *plain_branches(BRANCHES, width=3)[1], *pathway.parameters()]
    shapes = [leaf.shape for leaf in leaves]

    def function(flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes])
        embedding, *rest = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        branches = [lambda x, weight=weight: torch.tanh(x @ weight) for weight in rest[:BRANCHES]]
        parameters = dict(zip(names, rest[BRANCHES:], strict=True))
        return torch.func.functional_call(Run(pathway), parameters, (embedding, branches))

    flat = torch.cat([leaf.detach().flatten() for leaf in leaves]).requires_grad_()
    assert torch.autograd.gradcheck(function, (flat,), fast_mode=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_sees_another(variant):
    """A pathway works token by token: decoding one token at a time gives what the whole sequence gave."""
    pathway, (branches, _), tokens = stir(make(variant)), plain_branches(BRANCHES), randn(2, 5, WIDTH, seed=1)
    whole = drive(pathway, tokens, branches)[1]
    one_by_one = torch.cat([drive(pathway, token, branches)[1] for token in tokens.split(1, dim=1)], dim=1)
    torch.testing.assert_close(whole, one_by_one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_forwards_in_a_row_and_accumulation(variant):
    """The graph of one forward pass must not hang on another's."""
    pathway, (branches, weights) = stir(make(variant)), plain_branches(BRANCHES)
    leaves, batch = [*pathway.parameters(), *weights], randn(4, 5, WIDTH, seed=1)
    whole = torch.autograd.grad(drive(pathway, batch, branches)[1].square().sum(), leaves, allow_unused=True)

    halves = [drive(pathway, half, branches)[1].square().sum() for half in batch.split(2)]
    together = torch.autograd.grad(halves[0] + halves[1], leaves, allow_unused=True)
    for leaf in leaves:
        leaf.grad = None
    for half in batch.split(2):
        drive(pathway, half, branches)[1].square().sum().backward()
    for leaf, wanted, got in zip(leaves, whole, together, strict=True):
        if wanted is None:
            assert got is None
            continue
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(leaf.grad, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fork_leaves_its_state_alone(variant):
    pathway, (branches, _), embedding = stir(make(variant)), plain_branches(BRANCHES), randn(2, 5, WIDTH, seed=1)
    wanted = drive(pathway, embedding, branches)[1]
    state = pathway.start(embedding)
    for i, branch in enumerate(branches):
        other = state.fork()
        other.write(i, other.read(i) + 1)
        state.write(i, branch(state.read(i)))
    assert torch.equal(state.finish(), wanted)


class Everything(Probe):
    def __init__(self) -> None:
        self.sources: dict[tuple[int, int], Tensor] = {}
        self.weights: dict[tuple[int, int], Tensor] = {}
        self.gates: dict[tuple[str, int], Tensor] = {}

    def source(self, depth, stream, value_BTD):
        self.sources[depth, stream] = value_BTD
        return value_BTD

    def depth_weights(self, read, target, weights_BTS):
        self.weights[read, target] = weights_BTS

    def gate(self, name, branch, value):
        self.gates[name, branch] = value


STREAMS = {"dar": 2, "hyper_connections": None, "mhc": None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_probe_sees_every_depth_and_changes_nothing(variant):
    pathway, (branches, _), embedding = stir(make(variant)), plain_branches(BRANCHES), randn(2, 5, WIDTH, seed=1)
    probe = Everything()
    final = drive(pathway, embedding, branches, probe)[1]
    torch.testing.assert_close(final, drive(pathway, embedding, branches)[1], rtol=0, atol=1e-12)
    streams = {stream for _, stream in probe.sources}
    depths = {depth for depth, _ in probe.sources}
    wanted_streams = STREAMS.get(pathway.name, 1) or pathway.num_streams
    assert streams == set(range(wanted_streams))
    assert depths == set(range(len(depths)))
    assert probe.sources[0, 0] is embedding
    for weights_BTS in probe.weights.values():
        assert weights_BTS.shape[:2] == embedding.shape[:2]
        torch.testing.assert_close(weights_BTS.sum(-1), torch.ones(2, 5, dtype=torch.double), rtol=0, atol=1e-12)
    targets = {target for _, target in probe.weights}
    assert targets == {"dar": {0, 1}, "attnres": set(range(getattr(pathway.options, "num_queries", 1)))}.get(
        pathway.name, {0} if pathway.name == "transparent" else set()
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_probe_returns_is_used(variant):
    """Interventions: the last depth's states replaced by zeros must change the result."""
    pathway, (branches, _), embedding = stir(make(variant)), plain_branches(BRANCHES), randn(2, 5, WIDTH, seed=1)
    last = max(depth for depth, _ in _seen(pathway, embedding, branches).sources)

    class Zero(Probe):
        def source(self, depth, stream, value_BTD):
            return torch.zeros_like(value_BTD) if depth == last else value_BTD

    changed = drive(pathway, embedding, branches, Zero())[1]
    assert (changed - drive(pathway, embedding, branches)[1]).abs().max() > 1e-3


def _seen(pathway, embedding, branches) -> Everything:
    probe = Everything()
    drive(pathway, embedding, branches, probe)
    return probe


def vectors(value: object) -> set[int]:
    """Storages of tensors ``[..., D]`` that a state holds, the embedding that it compares shapes with left out."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()} if value.shape[-1:] == (WIDTH,) and value.ndim == 3 else set()
    if isinstance(value, torch.nn.Module):
        return set()
    if dataclasses.is_dataclass(value):
        names = [
            field.name for field in dataclasses.fields(value) if field.name not in ("embedding_BTD", "queries_JRD")
        ]
        return set().union(*(vectors(getattr(value, name)) for name in names))
    if isinstance(value, dict):
        return set().union(*map(vectors, value.values()))
    if isinstance(value, (tuple, list)):
        return set().union(*map(vectors, value))
    return set()


@pytest.mark.parametrize("arm", ARMS)
def test_the_cost_counts_what_the_state_really_holds(arm):
    """After the last branch; both streams of DAR start as one tensor, and so do all of a widened pathway."""
    pathway, (branches, _) = stir(make(arm)), plain_branches(BRANCHES)
    with torch.no_grad():
        _, final, state = drive(pathway, randn(2, 5, WIDTH, seed=1), branches)
    held = vectors(state)
    shared = 1 if pathway.name == "dar" else 0
    assert len(held) == pathway.cost().kept - shared
    assert final.shape == (2, 5, WIDTH)


def test_the_cost_of_reads_by_hand():
    """Four branches: AttnRes reads 2, 3, 4 and finally 5 sources; DAR with K = 1 sees 1+1, 2, 2+1 and 3, twice."""
    attnres = as_double(build("attnres", num_branches=4, width=WIDTH)).cost()
    assert attnres.moved == (2 + 3 + 4 + 5) + 4 + 4
    assert attnres.flops == 2 * (2 + 3 + 4 + 5) + (2 + 2 * 4) + sum(2 + 2 * left for left in (4, 3, 2, 1))
    dar = as_double(build("dar", num_branches=4, width=WIDTH)).cost()
    assert dar.moved == 2 * (2 + 2 + 3 + 3) + 4 + 2 * (3 + 5)
    logits = sum(2 * 2 + 2 * 2 * reads for reads in (4, 1, 3, 1, 1))
    assert dar.flops == 4 * (2 + 2 + 3 + 3) + logits + 2 * (2 + 8)
    assert build("residual", num_branches=4, width=WIDTH).cost().moved == 12


def test_gradients_reach_the_embedding_in_every_arm():
    for arm in ARMS:
        embedding = randn(2, 5, WIDTH, seed=1).requires_grad_()
        final = drive(make(arm), embedding, plain_branches(BRANCHES)[0])[1]
        assert gradients([final], [embedding])[0].abs().min() > 0
