"""The experts of every backend against the loop, and the router's losses against their definition."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
import torch

from backbone.experts.cases import CONFIG, LOADS, assert_close, experts, run, tokens
from darlit.backbone.experts import Experts, Routing, mean_routing
from darlit.errors import DarlitError


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_grouped_products_equal_the_loop(load: str, dtype: torch.dtype, tolerance: float) -> None:
    found = run(experts("torch", load).to(dtype), tokens(load, dtype))
    wanted = run(experts("reference", load).to(dtype), tokens(load, dtype))
    assert_close(found, wanted, tolerance)


def test_the_loads_are_what_they_claim() -> None:
    counts = {load: run(experts("reference", load), tokens(load))["counts"].tolist() for load in LOADS}
    assert 0 not in counts["random"]
    assert counts["an expert without a token"][3] == 0
    assert counts["all on one expert"] == [0, 0, 22, 0, 0]
    assert sum(counts["one token"]) == CONFIG.experts_per_token


def test_an_expert_without_a_token_gets_a_gradient_of_zero() -> None:
    module = experts("torch", "an expert without a token")
    run(module, tokens("an expert without a token"))
    rows = slice(3 * CONFIG.ffn_width, 4 * CONFIG.ffn_width)
    for weight in (module.gate, module.up, module.out):
        assert weight.grad is not None
        assert not weight.grad[rows].any()
        assert weight.grad.any()


def test_the_output_is_the_weighted_sum_of_the_chosen_experts() -> None:
    """One token by hand, in the order of the definition."""
    module = experts("torch", "one token")
    x_D = tokens("one token").detach()[0, 0]
    with torch.no_grad():
        normed_D = module.norm(x_D)
        scores_E = (module.router.weight @ normed_D).softmax(0)
        wanted_D = torch.zeros_like(x_D)
        for expert in scores_E.argsort(descending=True)[: CONFIG.experts_per_token]:
            rows = slice(expert * CONFIG.ffn_width, (expert + 1) * CONFIG.ffn_width)
            gate_F, up_F = module.gate[rows] @ normed_D, module.up[rows] @ normed_D
            wanted_D += scores_E[expert] * (gate_F * gate_F.sigmoid() * up_F) @ module.out[rows]
        found_D = module(x_D.view(1, 1, -1))[0].flatten()
    torch.testing.assert_close(found_D, wanted_D, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
def test_normalised_weights_are_an_option_that_is_obeyed(normalize: bool) -> None:
    plain, option = experts("torch"), experts("torch", normalize_expert_weights=normalize)
    assert torch.equal(plain(tokens())[0], option(tokens())[0]) != normalize
    assert_close(run(option, tokens()), run(experts("reference", normalize_expert_weights=normalize), tokens()), 1e-5)


def test_the_losses_are_those_of_olmoe() -> None:
    """``E sum_e f_e P_e`` and the mean of squared logsumexp, from the definition, token by token."""
    module = experts("reference")
    x_BTD = tokens()
    routing = module(x_BTD)[1]
    logits_NE = module.router(module.norm(x_BTD)).flatten(0, 1).double().tolist()
    counts, means, z = [0] * 5, [0.0] * 5, 0.0
    for logits in logits_NE:
        total = sum(math.exp(logit) for logit in logits)
        probabilities = [math.exp(logit) / total for logit in logits]
        for expert in sorted(range(5), key=lambda e: -probabilities[e])[:2]:
            counts[expert] += 1
        means = [mean + p / len(logits_NE) for mean, p in zip(means, probabilities, strict=True)]
        z += math.log(total) ** 2 / len(logits_NE)
    balancing = 5 * sum(c / sum(counts) * p for c, p in zip(counts, means, strict=True))
    assert routing.tokens_per_expert_E.tolist() == counts
    assert routing.load_balancing.item() == pytest.approx(balancing, rel=1e-5)
    assert routing.z.item() == pytest.approx(z, rel=1e-5)


def test_even_routing_has_a_load_balancing_loss_of_one() -> None:
    module = experts("torch")
    with torch.no_grad():
        module.router.weight.zero_()
    assert module(tokens())[1].load_balancing.item() == pytest.approx(1)


def test_layers_are_averaged_and_their_counts_kept_apart() -> None:
    one = Routing(torch.tensor(1.0), torch.tensor(4.0), torch.tensor([3, 1]))
    two = Routing(torch.tensor(2.0), torch.tensor(0.0), torch.tensor([0, 4]))
    mean = mean_routing([one, two])
    assert (mean.load_balancing.item(), mean.z.item()) == (1.5, 2.0)
    assert mean.tokens_per_expert_E.tolist() == [[3, 1], [0, 4]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"experts_per_token": 6}, "experts_per_token=6"),
        ({"experts_per_token": 0}, "experts_per_token=0"),
        ({"num_experts": -1}, "num_experts=-1"),
        ({"router_z_weight": -1.0}, "router_z_weight=-1.0"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, float], named: str) -> None:
    with pytest.raises(DarlitError, match=named):
        replace(CONFIG, **changes)  # type: ignore[arg-type]


def test_without_megablocks_the_message_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "megablocks" else find(name))
    with pytest.raises(DarlitError, match="make megablocks"):
        Experts(replace(CONFIG, experts="megablocks"))
    Experts(replace(CONFIG, experts="torch"))


@pytest.mark.skipif(
    importlib.util.find_spec("megablocks") is None, reason="megablocks is not installed: make megablocks"
)
def test_megablocks_on_a_cpu_says_what_to_choose() -> None:
    with pytest.raises(DarlitError, match=r"runs on a GPU.*experts=torch"):
        experts("megablocks")(tokens())
