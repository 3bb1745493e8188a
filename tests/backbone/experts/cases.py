"""Experts with weights and tokens that are worth comparing, and the loads that break a router."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from darlit.backbone import BackboneConfig
from darlit.backbone.experts import Experts, Routing

CONFIG = BackboneConfig(
    vocab_size=61, num_layers=2, width=64, num_heads=4, ffn_width=48, sequence_length=16, num_experts=5,
    experts_per_token=2,
)  # fmt: skip
LOADS = ("random", "an expert without a token", "all on one expert", "one token")


def experts(backend: str, load: str = "random", **changes: object) -> Experts:
    torch.manual_seed(0)
    per_token = 1 if load == "all on one expert" else CONFIG.experts_per_token
    module = Experts(replace(CONFIG, experts=backend, **{"experts_per_token": per_token, **changes}))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
        if load in ("an expert without a token", "all on one expert"):
            module.norm.weight.fill_(1)  # the tokens are positive
        if load == "an expert without a token":
            module.router.weight[3] = -1
        if load == "all on one expert":
            module.router.weight.zero_()[2] = 1
    return module


def tokens(load: str = "random", dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    x_BTD = torch.randn(1, 1, CONFIG.width) if load == "one token" else torch.randn(2, 11, CONFIG.width)
    if load in ("an expert without a token", "all on one expert"):
        x_BTD = x_BTD.abs()
    return x_BTD.to(dtype).requires_grad_()


def run(module: Experts, x_BTD: Tensor) -> dict[str, Tensor]:
    """Output, losses, counts, and the gradient of all of them in everything."""
    y_BTD, routing = module(x_BTD)
    assert isinstance(routing, Routing)
    weights = torch.linspace(-1, 1, y_BTD.numel()).view_as(y_BTD)
    ((weights * y_BTD.float()).sum() + 3 * routing.load_balancing + 0.5 * routing.z).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {
        "output": y_BTD.detach(),
        "load balancing": routing.load_balancing.detach(),
        "z": routing.z.detach(),
        "counts": routing.tokens_per_expert_E.detach(),
        "tokens": x_BTD.grad,
        **gradients,
    }  # type: ignore[dict-item]


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the norm of what is wanted; counts exactly."""
    assert found.keys() == wanted.keys()
    assert torch.equal(found["counts"].long(), wanted["counts"].long())
    for name, value in wanted.items():
        error = (found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-6)
        assert error <= tolerance, f"{name}: {error:.1e}"
