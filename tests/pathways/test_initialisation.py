"""What every arm is before its first step, and that none of its parameters or options is idle."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from darlit.pathways import build, families
from darlit.pathways.table import ARMS
from pathways.cases import (
    BRANCHES,
    VARIANTS,
    WIDTH,
    as_double,
    drive,
    make,
    plain_branches,
    randn,
    stir,
    token_batch,
    transformer,
)

LIKE_RESIDUAL = {
    variant: scale
    for scale, variants in {
        "exact": ("residual", "denseformer", "denseformer_sparse", "hc2", "hc2_static", "hc4", "hc1"),
        "mean": (
            "attnres_full",
            "attnres_block",
            "attnres_uneven",
            "attnres_sep_v",
            "attnres_full_sep_v",
            "dar_full",
            "dar_block",
            "dar_uneven",
            "dar_one_block",
            "dar_self_kv",
            "dar_cross_v",
            "dar_dynamic",
            "dar_dynamic_full",
            "dar_by_layer",
        ),
        "same": ("mhc1", "mhc2", "mhc3", "mhc4"),
    }.items()
    for variant in variants
}
"""Variants whose docstring states a bound. A read is the residual sum: exactly, over S, or up to rounding."""
UNLIKE_RESIDUAL = ("transparent", "attnres_2q", "dar_fixed_kv", "dar_no_partial", "dar_carry")
"""Variants whose docstring states the reason why there is no bound."""


def test_every_variant_says_how_it_starts():
    assert {*LIKE_RESIDUAL, *UNLIKE_RESIDUAL} == set(VARIANTS)


@pytest.mark.parametrize("variant", LIKE_RESIDUAL)
def test_logits_equal_the_standard_residuals_when_eps_is_nothing(variant):
    tokens = token_batch(2, 32)
    with torch.no_grad():
        got, wanted = (transformer(v, norm_eps=1e-300)(tokens) for v in (variant, "residual"))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", UNLIKE_RESIDUAL)
def test_logits_differ_where_the_docstring_says_so(variant):
    tokens = token_batch(2, 32)
    with torch.no_grad():
        got, wanted = (transformer(v, norm_eps=1e-300)(tokens) for v in (variant, "residual"))
    assert (got - wanted).abs().max() > 1e-4


@pytest.mark.parametrize("variant", LIKE_RESIDUAL)
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_the_norm_after_a_read_is_within_the_stated_bound(variant, eps):
    """``eps |1/c^2 - 1| / (2 mean(x^2))`` for a read ``c x`` of the residual sum x; c = 1/S, 1, read_share, or n."""
    pathway = make(variant, norm_eps=eps)
    embedding, (branches, _) = randn(2, 5, WIDTH, seed=1), plain_branches(BRANCHES)
    state, x = pathway.start(embedding), embedding
    per_source = 2 * getattr(pathway.options, "block_size", 1) or 1
    for i in range(BRANCHES + 1):
        read = state.read(i) if i < BRANCHES else state.finish()
        if LIKE_RESIDUAL[variant] == "mean":
            complete, inside = divmod(i, per_source) if i < BRANCHES else (math.ceil(i / per_source), 0)
            scale = 1 / (1 + complete + (inside > 0))
        elif i == BRANCHES:
            scale = getattr(pathway.options, "num_streams", 1)
        else:
            scale = pathway.options.read_share if variant == "mhc1" else 1
        torch.testing.assert_close(read, scale * x, rtol=0, atol=1e-10)
        got, wanted = (F.rms_norm(t, (WIDTH,), eps=eps) for t in (read, x))
        bound = eps * abs(1 / scale**2 - 1) / (2 * x.square().mean(-1, keepdim=True))
        assert ((got - wanted).abs() <= (bound + 1e-12) * wanted.abs()).all()
        if i < BRANCHES:
            output = branches[i](F.rms_norm(x, (WIDTH,), eps=eps))
            state.write(i, output)
            x = x + output


@pytest.mark.parametrize("arm", ARMS)
def test_initial_loss_is_that_of_a_uniform_guess(arm):
    for seed in range(10):
        model = transformer(arm, seed=seed, dtype=torch.float32)
        tokens = token_batch(4, 33, seed=seed)
        with torch.no_grad():
            loss = model.loss(tokens[:, :-1], tokens[:, 1:]).item()
        assert loss == pytest.approx(math.log(97), rel=0.02), seed


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_parameter_is_dead(variant):
    """Every query, gate and matrix row, one by one, gets a gradient within five steps; branches are not scale-free."""
    pathway = make(variant)
    branches, _ = plain_branches(BRANCHES)
    parameters = {name: parameter for name, parameter in pathway.named_parameters() if parameter.numel()}
    live = {name: torch.zeros(parameter.shape, dtype=torch.bool) for name, parameter in parameters.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0) if live else None
    for step in range(5 if live else 0):
        _, final, _ = drive(pathway, randn(2, 5, WIDTH, seed=step), branches)
        optimizer.zero_grad()
        ((final - randn(2, 5, WIDTH, seed=50)) ** 2).mean().backward()
        for name, parameter in parameters.items():
            live[name] |= parameter.grad.abs() > 1e-10
        optimizer.step()
    for name, seen in live.items():
        rows = seen.any(-1) if seen.shape[-1:] == (WIDTH,) else seen
        assert rows.all(), f"{name}: no gradient at {(~rows).nonzero().tolist()}"


@pytest.mark.parametrize("arm", ARMS)
def test_no_parameter_of_a_whole_model_is_dead(arm):
    model = transformer(arm, norm_eps=1e-6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    live = set()
    for step in range(5):
        tokens = token_batch(2, 17, seed=step)
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        live |= {
            name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()
        }
        optimizer.step()
    assert live == {name for name, _ in model.named_parameters()}


FLIPS = {
    "residual": {},
    "transparent": {},
    "denseformer": {"dilation": 2, "period": 2},
    "attnres": {"block_size": 1, "num_queries": 2, "sep_v": True, "query_init_std": 0.5},
    "hyper_connections": {"num_streams": 2, "connections": "static", "dynamic_scale": 0.5},
    "mhc": {"num_streams": 2, "read_share": 0.6, "res_logit": 1.0, "dynamic_scale": 0.5},
    "dar": {
        "block_size": 2,
        "route": "self_kv",
        "include_partial": False,
        "carry_partial": True,
        "gates": "dynamic",
        "beta_asymmetry": 0.5,
        "beta_pattern": "layer",
        "rho_logit": 0.0,
        "query_init_std": 0.5,
    },
}


def test_every_option_has_a_flip():
    """An option that is silently ignored."""
    assert {name: list(flips) for name, flips in FLIPS.items()} == {
        name: list(family.Options.__dataclass_fields__) for name, family in families().items()
    }


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, flips in FLIPS.items() for option in flips])
def test_flipping_an_option_changes_the_output_or_raises(name, option):
    def output(**options):
        torch.manual_seed(0)
        pathway = stir(as_double(build(name, num_branches=BRANCHES, width=WIDTH, **options)))
        return drive(pathway, randn(2, 5, WIDTH, seed=1), plain_branches(BRANCHES)[0])[1]

    if (name, option) == ("attnres", "num_queries"):
        with pytest.raises(ValueError, match=r"num_queries=2 with query_init_std=0\.0"):
            output(num_queries=2)
        assert (output(num_queries=2, query_init_std=0.5) - output(query_init_std=0.5)).abs().max() > 1e-6
        return
    flipped = {option: FLIPS[name][option]}
    if (name, option) == ("dar", "include_partial"):
        with pytest.warns(UserWarning, match="hides"):
            changed = output(**flipped)
    else:
        changed = output(**flipped)
    assert (changed - output()).abs().max() > 1e-6
