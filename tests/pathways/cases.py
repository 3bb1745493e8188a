"""What the pathway tests share: every arm and further variants, plain branches, and values with gradients.

Shapes: B batch, T token, D width.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from darlit.backbone import BackboneConfig, Transformer
from darlit.pathways import Pathway, PathwayState, Probe, build
from darlit.pathways.table import ARMS

WIDTH, BRANCHES = 16, 8
Branch = Callable[[Tensor], Tensor]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **ARMS,
    "dar_uneven": ("dar", {"block_size": 3}),
    "dar_one_block": ("dar", {"block_size": 4}),
    "dar_dynamic": ("dar", {"block_size": 2, "gates": "dynamic"}),
    "dar_dynamic_full": ("dar", {"gates": "dynamic"}),
    "dar_no_partial": ("dar", {"block_size": 2, "include_partial": False}),
    "dar_carry": ("dar", {"block_size": 2, "carry_partial": True}),
    "dar_by_layer": ("dar", {"beta_pattern": "layer"}),
    "attnres_uneven": ("attnres", {"block_size": 3}),
    "attnres_full_sep_v": ("attnres", {"sep_v": True}),
    "denseformer_sparse": ("denseformer", {"dilation": 2, "period": 2}),
    "hc2_static": ("hyper_connections", {"num_streams": 2, "connections": "static"}),
    "hc4": ("hyper_connections", {"num_streams": 4}),
    "hc1": ("hyper_connections", {"num_streams": 1}),
    "mhc1": ("mhc", {"num_streams": 1}),
    "mhc3": ("mhc", {"num_streams": 3}),
}
"""Every arm of the comparison, and the options that no arm uses."""


def make(variant: str, branches: int = BRANCHES, width: int = WIDTH, norm_eps: float = 1e-6, **more: Any) -> Pathway:
    """A pathway in float64, at its initial values."""
    name, options = VARIANTS[variant]
    return as_double(build(name, num_branches=branches, width=width, norm_eps=norm_eps, **{**options, **more}))


def as_double(pathway: Pathway) -> Pathway:
    """The same pathway with initial values that are exact in float64."""
    pathway.double()
    pathway.reset_parameters()
    return pathway


def stir(pathway: Pathway, std: float = 0.3) -> Pathway:
    """Move every parameter away from its initial value, by noise that depends on its name only."""
    with torch.no_grad():
        for name, parameter in pathway.named_parameters():
            noise = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter += std * torch.randn(parameter.shape, generator=noise, dtype=torch.double).to(parameter.dtype)
    return pathway


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.double) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(dtype)


def plain_branches(number: int, width: int = WIDTH, seed: int = 0) -> tuple[list[Branch], list[Tensor]]:
    """Branches ``tanh(x W_i)``, which are not scale-free, and their weights, which need gradients."""
    weights = [randn(width, width, seed=seed + i) / width**0.5 for i in range(number)]
    for weight in weights:
        weight.requires_grad_()
    return [lambda x, weight=weight: torch.tanh(x @ weight.to(x.dtype)) for weight in weights], weights


def drive(
    pathway: Pathway, embedding: Tensor, branches: Sequence[Branch], probe: Probe | None = None
) -> tuple[list[Tensor], Tensor, PathwayState]:
    """Run all branches; returns what each read, the final hidden state, and the state."""
    state = pathway.start(embedding) if probe is None else pathway.start(embedding, probe)
    inputs = []
    for i, branch in enumerate(branches):
        inputs.append(state.read(i))
        state.write(i, branch(inputs[-1]))
    return inputs, state.finish(), state


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random projection of all outputs, zeros for a leaf that plays no part."""
    loss = sum((randn(*output.shape, seed=100 + i) * output).sum() for i, output in enumerate(outputs))
    found = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def assert_same(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], leaves: Sequence[Tensor], tolerance: float = 1e-10
) -> None:
    """Values, and gradients of every leaf."""
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    for leaf, got, wanted in zip(leaves, gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        torch.testing.assert_close(
            got, wanted, rtol=tolerance, atol=tolerance, msg=lambda text, at=leaf: f"{at.shape} {text}"
        )


def transformer(variant: str, norm_eps: float = 1e-10, seed: int = 0, dtype=torch.float64, **shape: Any) -> Transformer:
    """A small whole model of a variant, 97 token ids, at its initial values."""
    torch.manual_seed(seed)
    small = {"vocab_size": 97, "num_layers": 4, "width": 64, "num_heads": 4, "ffn_width": 96, "sequence_length": 32}
    config = BackboneConfig(**{**small, **shape}, norm_eps=norm_eps)
    name, options = VARIANTS[variant]
    pathway = build(name, num_branches=config.num_branches, width=config.width, norm_eps=norm_eps, **options)
    model = Transformer(config, pathway).to(dtype)
    pathway.reset_parameters()
    return model


def token_batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model: Transformer, loss: Callable[[Tensor, Tensor], Tensor], tokens: Tensor) -> list[Tensor]:
    """The loss of ``tokens [B, T + 1]``, then every parameter's gradient in order."""
    model.zero_grad()
    value = loss(tokens[:, :-1], tokens[:, 1:])
    value.backward()
    return [value.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.numel())]
