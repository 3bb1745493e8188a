"""AttnRes against two independent implementations: fla-core's naive read and the attn-res package, in float32."""

from __future__ import annotations

import pytest
import torch
from attn_res.main import AttnResOperator
from torch import Tensor
from torch.func import functional_call

from darlit.bench.dense import Dense
from darlit.pathways import build
from pathways.cases import BRANCHES, VARIANTS, WIDTH, assert_same, drive, make, plain_branches, randn, stir

EPS = 1e-6


def outside(read, embedding, branches, branches_per_source):
    """AttnRes around any function ``read(index, sources)``: what every branch reads, then the final read."""
    sources, partial, inputs = [embedding], None, []
    for i, branch in enumerate(branches):
        inputs.append(read(i, sources + ([] if partial is None else [partial])))
        output = branch(inputs[-1])
        partial = output if partial is None else partial + output
        if (i + 1) % branches_per_source == 0 or i + 1 == len(branches):
            sources, partial = [*sources, partial], None
    return inputs, read(len(branches), sources)


def fla_read(queries_RD):
    naive = pytest.importorskip("fla.ops.attnres.naive", reason="fla-core is published for Linux only")
    gain = torch.ones(queries_RD.shape[-1])

    def read(index, sources):
        query = queries_RD[index - 1] if index else torch.zeros_like(queries_RD[0])
        return naive.naive_attnres(query, sources, gain, rms_eps=EPS)

    return read


@pytest.mark.parametrize(("block_size", "branches_per_source"), [(0, 1), (1, 2), (2, 4), (3, 6), (4, 8)])
def test_attnres_equals_fla_core(block_size, branches_per_source):
    pathway = stir(build("attnres", num_branches=BRANCHES, width=WIDTH, norm_eps=EPS, block_size=block_size))
    embedding = randn(2, 5, WIDTH, seed=1, dtype=torch.float32).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    ours = drive(pathway, embedding, branches)
    theirs = outside(fla_read(pathway.queries_JRD[0]), embedding, branches, branches_per_source)
    leaves = [pathway.queries_JRD, embedding, *weights]
    assert_same([*ours[0], ours[1]], [*theirs[0], theirs[1]], leaves, tolerance=2e-5)


def test_attnres_2q_equals_two_averaged_fla_core_reads():
    options = {"block_size": 1, "num_queries": 2, "query_init_std": 0.02}
    pathway = stir(build("attnres", num_branches=BRANCHES, width=WIDTH, norm_eps=EPS, **options))
    embedding = randn(2, 5, WIDTH, seed=1, dtype=torch.float32).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    ours = drive(pathway, embedding, branches)
    one, two = (fla_read(queries_RD) for queries_RD in pathway.queries_JRD)
    theirs = outside(lambda *read: (one(*read) + two(*read)) / 2, embedding, branches, 2)
    assert_same(
        [*ours[0], ours[1]], [*theirs[0], theirs[1]], [pathway.queries_JRD, embedding, *weights], tolerance=2e-5
    )


@pytest.mark.parametrize(("variant", "branches_per_source"), [("attnres_full", 1), ("attnres_block", 4)])
def test_attnres_equals_the_attn_res_package(variant, branches_per_source):
    """The package computes its key norm in float32 for any dtype, so it agrees to that precision."""
    pathway = stir(make(variant, norm_eps=EPS))
    embedding = randn(2, 5, WIDTH, seed=1).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    operator = AttnResOperator(WIDTH, eps=EPS)

    def read(index: int, sources: list[Tensor]) -> Tensor:
        query = pathway.queries_JRD[0, index - 1] if index else torch.zeros(WIDTH, dtype=torch.double)
        return functional_call(operator, {"pseudo_query": query}, (torch.stack(sources),))

    ours = drive(pathway, embedding, branches)
    theirs = outside(read, embedding, branches, branches_per_source)
    assert_same(
        [*ours[0], ours[1]], [*theirs[0], theirs[1]], [pathway.queries_JRD, embedding, *weights], tolerance=2e-6
    )


@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family == "attnres"])
def test_attnres_equals_its_dense_formula(variant):
    """No independent code of SepV is public: the formula, written out densely; golden tensors pin it as well."""
    pathway = stir(make(variant, norm_eps=EPS))
    embedding = randn(2, 5, WIDTH, seed=1).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    ours, theirs = drive(pathway, embedding, branches), drive(Dense(pathway), embedding, branches)
    assert_same([*ours[0], ours[1]], [*theirs[0], theirs[1]], [*pathway.parameters(), embedding, *weights])


@pytest.mark.parametrize("block_size", [0, 1, 2])
def test_sep_v_starts_as_attnres_without_it(block_size):
    embedding, (branches, _) = randn(2, 5, WIDTH, seed=1), plain_branches(BRANCHES)
    with_v = make("attnres_sep_v", block_size=block_size)
    without = make("attnres_block", block_size=block_size)
    with torch.no_grad():
        without.queries_JRD.copy_(randn(*without.queries_JRD.shape, seed=3))
        with_v.queries_JRD.copy_(without.queries_JRD)
    torch.testing.assert_close(drive(with_v, embedding, branches)[1], drive(without, embedding, branches)[1])
