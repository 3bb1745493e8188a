"""mHC against the paper's formula, written here on its own: dense matrices, plain exponentials, float64."""

from __future__ import annotations

import pytest
import torch

from darlit.ops.reference import doubly_stochastic, sinkhorn
from darlit.pathways import Probe
from pathways.cases import BRANCHES, WIDTH, assert_same, drive, make, plain_branches, randn, stir

EPS = 1e-6


def paper(pathway, embedding, branches, transposed=False):
    """x [B, T, n, D]; x <- H_res x + H_post^T f(H_pre x), H_res by 20 rounds of T_r(T_c(.)) on exp(.)."""
    n, inputs = pathway.num_streams, []
    x = torch.stack([embedding] * n, dim=2)
    for i, branch in enumerate(branches):
        flat = x.flatten(-2)
        normed = flat / (flat.pow(2).mean(-1, keepdim=True) + EPS).sqrt()

        rows = {"pre": slice(0, n), "post": slice(n, 2 * n), "res": slice(2 * n, None)}
        phi = pathway.projections_CND[i].flatten(1).T

        def logits(kind, at, normed=normed, phi=phi, rows=rows):
            return getattr(pathway, f"{kind}_scale_I")[at] * (normed @ phi[:, rows[kind]])

        pre = torch.sigmoid(logits("pre", i) + pathway.pre_bias_IN[i])
        post = 2 * torch.sigmoid(logits("post", i) + pathway.post_bias_IN[i])
        if i in pathway.res_slot:
            slot = pathway.res_slot[i]
            res = torch.exp(logits("res", slot).reshape(*x.shape[:2], n, n) + pathway.res_bias_INN[slot])
            for _ in range(200 if n == 2 else 20):
                res = res / res.sum(-2, keepdim=True)
                res = res / res.sum(-1, keepdim=True)
        else:
            res = torch.eye(n, dtype=torch.double).expand(*x.shape[:2], n, n)
        inputs.append((pre.unsqueeze(-2) @ x).squeeze(-2))
        carried = (res.transpose(-1, -2) if transposed else res) @ x
        x = carried + post.unsqueeze(-1) * branch(inputs[-1]).unsqueeze(-2)
    return inputs, x.sum(2)


def asymmetric(n, scale=1.0):
    """A pathway whose H_res are far from symmetric: logits of a shift to the next stream on top of noise."""
    pathway = stir(make("mhc4", num_streams=n, norm_eps=EPS, res_logit=0.5))
    with torch.no_grad():
        pathway.res_bias_INN += scale * 2 * torch.eye(n, dtype=torch.double).roll(1, dims=-1)
    return pathway


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_mhc_equals_the_papers_formula(n):
    pathway = asymmetric(n)
    embedding = randn(2, 5, WIDTH, seed=1).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    ours, theirs = drive(pathway, embedding, branches), paper(pathway, embedding, branches)
    assert_same([*ours[0], ours[1]], [*theirs[0], theirs[1]], [*pathway.parameters(), embedding, *weights])


@pytest.mark.parametrize("n", [3, 4])
def test_the_transposed_matrix_is_another_model(n):
    """If this agreed, the comparison above could not see a transposed H_res."""
    pathway, embedding, (branches, _) = asymmetric(n), randn(2, 5, WIDTH, seed=1), plain_branches(BRANCHES)
    ours, wrong = drive(pathway, embedding, branches), paper(pathway, embedding, branches, transposed=True)
    assert (ours[1] - wrong[1]).abs().max() > 1e-2


def test_output_stream_o_takes_row_o_of_an_asymmetric_matrix():
    """With numbers: stream 0 gives to stream 1, 1 to 2, 2 to 3, 3 to 0."""
    shift = torch.eye(4, dtype=torch.double).roll(1, dims=0)
    assert not torch.equal(shift, shift.T)
    pathway, seen = make("mhc4"), {}
    with torch.no_grad():
        pathway.res_bias_INN[0].copy_(80 * shift)
        pathway.post_bias_IN[0].copy_(torch.tensor([-40.0, 0.0, 40.0, 0.0]))

    class Streams(Probe):
        def source(self, depth, stream, value_BTD):
            seen[depth, stream] = value_BTD[0, 0, 0].item()
            return value_BTD

    embedding = torch.zeros(1, 1, WIDTH, dtype=torch.double)
    branches = [torch.ones_like, *[torch.zeros_like] * (BRANCHES - 1)]
    drive(pathway, embedding, branches, Streams())
    # The first branch gave 0, 1, 2, 1 to the streams; the second one, of zero output, only exchanges them.
    assert [seen[1, s] for s in range(4)] == pytest.approx([1, 0, 1, 2], abs=1e-9)


@pytest.mark.parametrize("n", [2, 4])
def test_forced_swap_of_two_streams(n):
    """H_res computed and then dropped."""
    pathway, seen = make("mhc2", num_streams=n), {}
    swap = torch.eye(n, dtype=torch.double)
    swap[:2, :2] = swap[:2, :2].flip(0)
    with torch.no_grad():
        pathway.res_bias_INN[0].copy_(80 * swap)
        pathway.post_bias_IN[0].copy_(torch.tensor([-40.0, 40.0] + [0.0] * (n - 2)))

    class Streams(Probe):
        def source(self, depth, stream, value_BTD):
            seen[depth, stream] = value_BTD[0, 0, 0].item()
            return value_BTD

    branches = [torch.ones_like, *[torch.zeros_like] * (BRANCHES - 1)]
    drive(pathway, torch.zeros(1, 1, WIDTH, dtype=torch.double), branches, Streams())
    assert [seen[1, s] for s in range(n)] == pytest.approx([2, 0] + [1] * (n - 2), abs=1e-9)


def test_the_closed_form_is_the_limit_of_sinkhorn():
    logits = 3 * randn(50, 2, 2, seed=5)
    torch.testing.assert_close(doubly_stochastic(logits), sinkhorn(logits, 2000), rtol=0, atol=1e-10)


def test_sinkhorn_is_doubly_stochastic():
    matrix = doubly_stochastic(randn(50, 4, 4, seed=5))
    ones = torch.ones(50, 4, dtype=torch.double)
    torch.testing.assert_close(matrix.sum(-1), ones, rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix.sum(-2), ones, rtol=0, atol=1e-6)


def test_the_exchange_starts_near_the_identity():
    for n in (2, 4):
        matrix = doubly_stochastic(make("mhc2", num_streams=n).res_bias_INN[0])
        assert matrix.diagonal().min() > 0.94
        assert matrix.diagonal().max() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 4])
def test_finite_for_logits_far_apart(n, dtype):
    """Finite values and gradients at the ends of the range of the logits."""
    far = torch.full((n, n), -60.0)
    far[0], far[:, -1] = 60.0, 60.0
    cases = [far, -far, 60 * torch.eye(n), torch.full((n, n), -8.0), 120 * torch.eye(n) - 60, torch.full((n, n), 60.0)]
    logits = torch.stack(cases).to(dtype).requires_grad_()
    matrix = doubly_stochastic(logits)
    matrix.pow(2).sum().backward()
    assert matrix.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    torch.testing.assert_close(matrix.sum(-1), torch.ones(len(cases), n), rtol=0, atol=1e-5)
