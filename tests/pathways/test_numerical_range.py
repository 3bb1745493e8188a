"""Gates, softmax and exchanges stay finite for logits of +-60, in values and gradients.

Sinkhorn by itself is in test_manifold_hyper_connections.py.
"""

from __future__ import annotations

import pytest
import torch

from darlit.pathways import build
from pathways.cases import BRANCHES, VARIANTS, WIDTH, drive, plain_branches, randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_finite_for_logits_of_sixty(variant, dtype):
    name, options = VARIANTS[variant]
    pathway = build(name, num_branches=BRANCHES, width=WIDTH, **options)
    with torch.no_grad():
        for parameter_name, parameter in pathway.named_parameters():
            signs = torch.sign(randn(*parameter.shape, seed=len(parameter_name), dtype=torch.float32))
            if parameter_name in ("queries_JRD",) or parameter_name.endswith("projection_GOD"):
                parameter.copy_(60 / WIDTH * signs)  # a key of ones and minus ones reaches +-60
            elif "logit" in parameter_name or "bias" in parameter_name or parameter_name == "weights_W":
                parameter.copy_(60 * signs if name != "denseformer" else signs)
            elif "projection" in parameter_name:
                parameter.copy_(60 / WIDTH * signs)
    embedding = torch.sign(randn(2, 5, WIDTH, seed=1)).to(dtype).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    inputs, final, _ = drive(pathway, embedding, branches)
    assert final.dtype == dtype
    final.float().square().mean().backward()
    for tensor in (*inputs, final):
        assert tensor.isfinite().all()
    for leaf in (embedding, *pathway.parameters(), *weights):
        assert leaf.grad is None or leaf.grad.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_nan_is_never_hidden(variant):
    name, options = VARIANTS[variant]
    pathway = build(name, num_branches=BRANCHES, width=WIDTH, **options)
    branches, _ = plain_branches(BRANCHES)
    branches[2] = lambda x: torch.full_like(x, torch.nan)
    _, final, _ = drive(pathway, randn(1, 2, WIDTH, seed=1, dtype=torch.float32), branches)
    assert final.isnan().all()
