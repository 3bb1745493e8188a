"""Small models for the tests of probes: float64, every weight large enough to matter.

Shapes: B batch, T token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from darlit import pathways
from darlit.backbone import BackboneConfig, Transformer
from darlit.pathways.table import ARMS

CONFIG = BackboneConfig(vocab_size=61, num_layers=3, width=16, num_heads=2, ffn_width=24, sequence_length=16)


def build(arm: str, noise: float = 0.3, **options: Any) -> Transformer:
    """An arm with all parameters moved from their start by normal noise; ``noise`` 0 leaves the pathway's alone."""
    torch.manual_seed(0)
    name, own = ARMS[arm]
    pathway = pathways.build(name, num_branches=CONFIG.num_branches, width=CONFIG.width, **{**own, **options})
    model = Transformer(CONFIG, pathway).double().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            scale = noise if key.startswith("pathway") else 0.3
            parameter += scale * torch.randn(parameter.shape, dtype=torch.double)
    return model


def tokens(batch: int = 6, length: int = 12, seed: int = 1) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
