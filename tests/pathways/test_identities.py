"""Identities of the mathematics, in float64 and to 1e-10: they hold between pathways, whatever the branches."""

from __future__ import annotations

import pytest
import torch

from darlit.ops.reference import doubly_stochastic, sinkhorn
from darlit.pathways.history import transport
from pathways.cases import BRANCHES, WIDTH, drive, make, plain_branches, randn

NEVER = 1e3
"""A logit whose sigmoid is one to the last bit of a float64."""


def dar_with_equal_streams(route: str, block_size: int, queries_RD: torch.Tensor):
    """beta 1, rho 1, alpha 1/2, one query for both targets: the streams can only be equal."""
    std = 0.02 if route == "fixed_kv" else 0.0
    pathway = make("dar_full", route=route, block_size=block_size, beta_asymmetry=0.0, query_init_std=std)
    with torch.no_grad():
        pathway.rho.logit_GO.fill_(NEVER)
        pathway.queries_JRD.copy_(queries_RD.expand_as(pathway.queries_JRD))
    return pathway


@pytest.mark.parametrize("route", ["dar", "self_kv", "cross_v", "fixed_kv"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_dar_with_equal_streams_is_block_attnres(route, block_size):
    """block_size 4 is one block: AttnRes with N = 1."""
    attnres = make("attnres_block", block_size=block_size)
    with torch.no_grad():
        attnres.queries_JRD.copy_(randn(*attnres.queries_JRD.shape, seed=7))
    dar = dar_with_equal_streams(route, block_size, attnres.queries_JRD[0])
    embedding, (branches, _) = randn(2, 5, WIDTH, seed=1), plain_branches(BRANCHES)
    ours, theirs = drive(dar, embedding, branches), drive(attnres, embedding, branches)
    for got, wanted in zip([*ours[0], ours[1]], [*theirs[0], theirs[1]], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_rho_transport_is_sinkhorn_of_two_by_two_logits():
    logits = 2 * randn(40, 2, 2, seed=3)
    rho = torch.sigmoid((logits[:, 0, 0] + logits[:, 1, 1] - logits[:, 0, 1] - logits[:, 1, 0]) / 2)
    one, two = randn(40, WIDTH, seed=4), randn(40, WIDTH, seed=5)
    carried = transport((one, two), rho.unsqueeze(-1))
    for matrix in (sinkhorn(logits, 3000), doubly_stochastic(logits)):
        for o, got in enumerate(carried):
            wanted = matrix[:, o, :1] * one + matrix[:, o, 1:] * two
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_transport_keeps_the_sum_and_shrinks_the_difference():
    one, two, rho = randn(40, WIDTH, seed=4), randn(40, WIDTH, seed=5), torch.rand(40, 1, dtype=torch.double)
    left, right = transport((one, two), rho)
    torch.testing.assert_close(left + right, one + two, rtol=0, atol=1e-12)
    torch.testing.assert_close(left - right, (2 * rho - 1) * (one - two), rtol=0, atol=1e-12)


def test_one_static_hyper_connection_is_the_residual():
    embedding, (branches, _) = randn(2, 5, WIDTH, seed=1), plain_branches(BRANCHES)
    hc, residual = make("hc1", connections="static"), make("residual")
    assert torch.equal(drive(hc, embedding, branches)[1], drive(residual, embedding, branches)[1])


def test_mhc_with_two_streams_exchanges_as_dar_does():
    """The carried part of a write: H_res with logits b against `transport` with the matching rho."""
    pathway = make("mhc2")
    with torch.no_grad():
        pathway.res_bias_INN[0].copy_(randn(2, 2, seed=9))
    (a, b), (c, d) = pathway.res_bias_INN[0]
    streams = (randn(2, 5, WIDTH, seed=4), randn(2, 5, WIDTH, seed=5))
    res = pathway.mixing(1, streams).res
    carried = transport(streams, torch.sigmoid((a + d - b - c) / 2))
    for o, wanted in enumerate(carried):
        got = sum(res[..., o, i, None] * streams[i] for i in (0, 1))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_transparent_is_denseformer_with_rows_that_sum_to_one():
    transparent, denseformer = make("transparent"), make("denseformer")
    with torch.no_grad():
        transparent.weights_W.copy_(randn(*transparent.weights_W.shape, seed=2))
        rows = [transparent.row(layer) for layer in range(1, BRANCHES // 2 + 1)]
        denseformer.weights_W.copy_(torch.cat(rows))
    embedding, (branches, _) = randn(2, 5, WIDTH, seed=1), plain_branches(BRANCHES)
    got, wanted = (drive(pathway, embedding, branches)[1] for pathway in (transparent, denseformer))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
