"""Every way to differentiate a forward pass gives the reference's gradients: the fused operators against it in float64.

A mode takes a pathway, an embedding and branch weights, and returns tensors; the same code runs on both sides.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from darlit.bench.dense import Dense
from darlit.errors import DarlitError
from darlit.pathways import build
from pathways.cases import VARIANTS, randn

BRANCHES, WIDTH = 12, 24
DENSE = [name for name, (family, _) in VARIANTS.items() if family in ("attnres", "dar") and "sep_v" not in name]
"""sep_v projects at a write, the dense formula at a read: without gradients these are different constants."""
FUSED = [name for name, (family, _) in VARIANTS.items() if family in ("attnres", "dar", "hyper_connections", "mhc")]


def branch(x, weight):
    return torch.tanh(x @ weight)


def advance(state, weights, first, last):
    for i in range(first, last):
        state.write(i, branch(state.read(i), weights[i]))
    return state


def forward(pathway, x, weights):
    return advance(pathway.start(x), weights, 0, BRANCHES).finish()


def recomputed(pathway, x, weights, layers=1):
    state = pathway.start(x)
    for first in range(0, BRANCHES, 2 * layers):
        state = checkpoint(
            lambda state, at: advance(state.fork(), weights, at, at + 2 * layers), state, first, use_reentrant=False
        )
    return state.finish()


def leaves_of(pathway, x, weights):
    return [x, *weights, *(parameter for parameter in pathway.parameters() if parameter.numel())]


def grads(loss, pathway, x, weights, **options):
    leaves = leaves_of(pathway, x, weights)
    found = torch.autograd.grad(loss, leaves, allow_unused=True, **options)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def plain(pathway, x, weights):
    hidden = forward(pathway, x, weights)
    return [hidden, *grads(hidden.square().sum(), pathway, x, weights)]


def recomputed_layer_by_layer(pathway, x, weights):
    return grads(recomputed(pathway, x, weights).square().sum(), pathway, x, weights)


def recomputed_in_regions_that_cut_blocks(pathway, x, weights):
    return grads(recomputed(pathway, x, weights, layers=3).square().sum(), pathway, x, weights)


def accumulated(pathway, x, weights):
    for leaf in leaves_of(pathway, x, weights):
        leaf.grad = None
    for scale in (1.0, 0.5):
        forward(pathway, scale * x, weights).square().sum().backward()
    return [leaf.grad for leaf in leaves_of(pathway, x, weights) if leaf.grad is not None]


def two_forwards_before_a_backward(pathway, x, weights):
    first, second = forward(pathway, x, weights), forward(pathway, x * 0.5, weights)
    return grads((first * second).sum(), pathway, x, weights)


def second_backward_through_a_kept_graph(pathway, x, weights):
    hidden = forward(pathway, x, weights)
    first = grads(hidden.square().sum(), pathway, x, weights, retain_graph=True)
    return [*first, *grads(hidden.sin().sum(), pathway, x, weights)]


def parts_of_the_leaves(pathway, x, weights):
    hidden, found = forward(pathway, x, weights), []
    loss = hidden.square().sum()
    for leaf in [*leaves_of(pathway, x, weights), x]:
        (grad,) = torch.autograd.grad(loss, [leaf], retain_graph=True, allow_unused=True)
        found += [] if grad is None else [grad]
    return found


def parts_of_the_outputs(pathway, x, weights):
    """Some reads count and the end does not; then the end alone through the kept graph."""
    state, reads = pathway.start(x), []
    for i in range(BRANCHES):
        reads.append(state.read(i))
        state.write(i, branch(reads[-1], weights[i]))
    early = grads((reads[3].square() + reads[6].sin()).sum(), pathway, x, weights, retain_graph=True)
    return [*early, *grads(state.finish().square().sum(), pathway, x, weights)]


def without_gradients(pathway, x, weights):
    with torch.no_grad():
        return [forward(pathway, x, weights)]


def lower_branches_without_gradients(pathway, x, weights, begins=0, ends=5):
    state = pathway.start(x)
    advance(state, weights, 0, begins)
    with torch.no_grad():
        advance(state, weights, begins, ends)
    hidden = advance(state, weights, ends, BRANCHES).finish()
    return [hidden, *grads(hidden.square().sum(), pathway, x, weights)]


def middle_branches_without_gradients(pathway, x, weights):
    return lower_branches_without_gradients(pathway, x, weights, begins=3, ends=6)


def started_without_gradients(pathway, x, weights):
    with torch.no_grad():
        state = pathway.start(x)
    hidden = advance(state, weights, 0, BRANCHES).finish()
    return [hidden, *grads(hidden.square().sum(), pathway, x, weights)]


def a_fork_and_its_origin(pathway, x, weights):
    state = advance(pathway.start(x), weights, 0, 5)
    fork = state.fork()
    one = advance(state, weights, 5, BRANCHES).finish()
    two = advance(fork, [0.5 * weight for weight in weights], 5, BRANCHES).finish()
    return [one, two, *grads((one * two + two.square()).sum(), pathway, x, weights)]


def a_fork_that_only_reads(pathway, x, weights):
    state = advance(pathway.start(x), weights, 0, 4)
    aside = state.fork().read(4)
    hidden = advance(state, weights, 4, BRANCHES).finish()
    return [aside, *grads((hidden * aside).sum(), pathway, x, weights)]


def a_fork_after_reading(pathway, x, weights):
    state = advance(pathway.start(x), weights, 0, 5)
    read = state.read(5)
    fork = state.fork()
    state.write(5, branch(read, weights[5]))
    fork.write(5, read.cos())
    one, two = (advance(each, weights, 6, BRANCHES).finish() for each in (state, fork))
    return [one, two, *grads((one * two).sum(), pathway, x, weights)]


def reads_and_end_called_twice(pathway, x, weights):
    state, extra = pathway.start(x), 0
    for i in range(BRANCHES):
        first, again = state.read(i), state.read(i)
        extra = extra + (first.sin() * again).sum()
        state.write(i, branch(again, weights[i]))
    one, two = state.finish(), state.finish()
    return [one, two, *grads((one * two.sin()).sum() + extra, pathway, x, weights)]


def frozen_queries_and_gates(pathway, x, weights):
    for parameter in pathway.parameters():
        parameter.requires_grad_(False)
    hidden = forward(pathway, x, weights)
    return [hidden, *torch.autograd.grad(hidden.square().sum(), [x, *weights])]


def only_the_pathway_is_trained(pathway, x, weights):
    x, weights = x.detach(), [weight.detach() for weight in weights]
    parameters = [parameter for parameter in pathway.parameters() if parameter.numel()]
    hidden = forward(pathway, x, weights)
    found = torch.autograd.grad(hidden.square().sum(), parameters, allow_unused=True)
    return [grad for grad in found if grad is not None]


def with_two_threads(pathway, x, weights):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return plain(pathway, x.repeat(1, 100, 1).detach().requires_grad_(), weights)
    finally:
        torch.set_num_threads(threads)


MODES = [
    plain,
    recomputed_layer_by_layer,
    recomputed_in_regions_that_cut_blocks,
    accumulated,
    two_forwards_before_a_backward,
    second_backward_through_a_kept_graph,
    parts_of_the_leaves,
    parts_of_the_outputs,
    without_gradients,
    lower_branches_without_gradients,
    middle_branches_without_gradients,
    started_without_gradients,
    a_fork_and_its_origin,
    a_fork_that_only_reads,
    a_fork_after_reading,
    reads_and_end_called_twice,
    frozen_queries_and_gates,
    only_the_pathway_is_trained,
    with_two_threads,
]


def setup(variant, implementation, dtype):
    family, options = VARIANTS[variant]
    pathway = build(
        family, num_branches=BRANCHES, width=WIDTH, norm_eps=1e-6, implementation=implementation, **options
    ).to(dtype)
    for index, parameter in enumerate(pathway.parameters()):
        parameter.data = 0.3 * randn(*parameter.shape, seed=50 + index, dtype=dtype)
    x = randn(2, 5, WIDTH, seed=1, dtype=dtype).requires_grad_()
    weights = [(randn(WIDTH, WIDTH, seed=2 + i) / WIDTH**0.5).to(dtype).requires_grad_() for i in range(BRANCHES)]
    return pathway, x, weights


def assert_close(ours, theirs, tolerance=5e-5):
    assert len(ours) == len(theirs)
    for place, (got, wanted) in enumerate(zip(ours, theirs, strict=True)):
        error = (got.double() - wanted).norm() / wanted.norm().clamp(min=wanted.numel() ** 0.5 * 1e-2)
        assert error < tolerance, f"tensor {place} {tuple(wanted.shape)}: {error:.1e}"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("variant", FUSED)
def test_fused_equals_the_reference(variant, mode):
    assert setup(variant, "cpu", torch.float32)[0].start(torch.zeros(1, 1, WIDTH)).implementation == "cpu"
    ours = mode(*setup(variant, "cpu", torch.float32))
    theirs = mode(*setup(variant, "reference", torch.float64))
    assert_close(ours, theirs)


@pytest.mark.parametrize(
    "mode",
    [lower_branches_without_gradients, middle_branches_without_gradients, reads_and_end_called_twice],
    ids=lambda mode: mode.__name__,
)
@pytest.mark.parametrize("variant", DENSE)
def test_the_reference_equals_its_dense_formula(variant, mode):
    """Logits are computed when a source is written: also the queries of later reads get their complete gradient."""
    pathway, x, weights = setup(variant, "reference", torch.float64)
    assert_close(mode(pathway, x, weights), mode(Dense(pathway), x, weights), tolerance=1e-10)


@pytest.mark.parametrize("variant", FUSED)
def test_nothing_of_a_backward_pass_is_kept(variant):
    pathway, x, weights = setup(variant, "cpu", torch.float32)
    state = pathway.start(x)
    hidden = advance(state, weights, 0, BRANCHES).finish()
    torch.autograd.grad(hidden.sum(), [x], retain_graph=True)
    torch.autograd.grad(hidden.sum(), weights[-1:], retain_graph=True)
    history = getattr(state, "history", None)
    if history is not None:
        assert not history.call._tasks


@pytest.mark.parametrize("variant", ["attnres_full", "dar_full", "mhc2", "hc2", "hc2_static"])
def test_second_derivatives_raise_one_line(variant):
    pathway, x, weights = setup(variant, "cpu", torch.float32)
    with pytest.raises(DarlitError, match="no second derivatives .* implementation='reference'") as raised:
        grads(forward(pathway, x, weights).square().sum(), pathway, x, weights, create_graph=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("variant", ["attnres_full", "dar_full", "dar_block", "mhc2", "hc2", "hc2_static"])
def test_forward_mode_and_function_transforms_raise(variant):
    pathway, x, weights = setup(variant, "cpu", torch.float32)
    weights, x = [weight.detach() for weight in weights], x.detach()
    with pytest.raises(RuntimeError, match="jvp|functorch|setup_context"):
        torch.func.jvp(lambda x: forward(pathway, x, weights), (x,), (torch.ones_like(x),))
    with pytest.raises(RuntimeError, match="functorch|setup_context"):
        torch.func.grad(lambda x: forward(pathway, x, weights).sum())(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        forward(pathway, forward_ad.make_dual(x, torch.ones_like(x)), weights)


def test_queries_changed_in_place_before_the_backward_pass_raise():
    pathway, x, weights = setup("dar_full", "cpu", torch.float32)
    loss = forward(pathway, x, weights).sum()
    with torch.no_grad():
        pathway.queries_JRD.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("variant", ["residual", "transparent", *FUSED])
def test_an_embedding_of_another_width_raises_before_any_kernel_runs(variant, implementation):
    family, options = VARIANTS[variant]
    if family in ("residual", "transparent"):
        implementation = "auto"
    pathway = build(family, num_branches=BRANCHES, width=16, implementation=implementation, **options)
    for width in (17, 8):
        with pytest.raises(DarlitError, match=rf"embedding \(2, 5, {width}\) .* width 16") as raised:
            pathway.start(torch.randn(2, 5, width))
        assert "\n" not in str(raised.value)
    with pytest.raises(DarlitError, match="floating-point"):
        pathway.start(torch.ones(2, 5, 16, dtype=torch.long))


@pytest.mark.parametrize("variant", ["residual", *FUSED])
def test_a_branch_output_of_another_width_raises_before_any_kernel_runs(variant):
    family, options = VARIANTS[variant]
    state = build(family, num_branches=BRANCHES, width=16, **options).start(torch.randn(2, 5, 16))
    state.read(0)
    for shape in ((2, 5, 17), (2, 5, 8), (2, 6, 16)):
        with pytest.raises(DarlitError, match="must keep shape"):
            state.write(0, torch.randn(shape))
    state.write(0, torch.randn(2, 5, 16))
