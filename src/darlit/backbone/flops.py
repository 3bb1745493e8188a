"""Floating-point operations per token of one training step, counted from shapes (a multiply-add is two)."""

from __future__ import annotations

from torch import nn

from darlit.backbone.transformer import Transformer


def training_flops_per_token(model: Transformer) -> float:
    """Forward and backward of the branches and the head: 6 per matrix parameter, 12 L T D for causal attention / 2.

    The pathway's own arithmetic is left out: it is memory traffic, and its cost shows in tokens/s.
    """
    config = model.config
    matrices = sum(module.weight.numel() for module in model.layers.modules() if isinstance(module, nn.Linear))
    head = config.vocab_size * config.width
    attention = 6 * config.num_layers * config.sequence_length * config.width
    return 6.0 * (matrices + head) + attention
