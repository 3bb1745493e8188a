"""What a model costs, counted from its shapes: parameters, and floating-point operations per token."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from darlit.backbone.experts import Experts
from darlit.backbone.transformer import Transformer


class ParameterCounts(NamedTuple):
    """Parameters of a whole model; of a sharded one too, whatever a rank holds of it."""

    total: int
    active: int
    """Those that one token meets: of E experts the k that it is sent to."""
    pathway: int


def parameter_counts(model: Transformer) -> ParameterCounts:
    """Count them; exact, also on the meta device."""
    total = sum(parameter.numel() for parameter in model.parameters())
    pathway = sum(parameter.numel() for parameter in model.pathway.parameters())
    return ParameterCounts(total, total - _expert_weights(model) + _active_expert_weights(model), pathway)


def training_flops_per_token(model: Transformer) -> float:
    """Forward and backward of the branches and the head: 6 per matrix parameter, 12 L T D for causal attention / 2.

    A multiply-add is two. Of the experts those that a token is sent to. What is recomputed is not counted, nor is
    the pathway's own arithmetic: that is memory traffic, and its cost shows in tokens/s.
    """
    config = model.config
    matrices = sum(module.weight.numel() for module in model.layers.modules() if isinstance(module, nn.Linear))
    head = config.rows * config.width
    attention = 6 * config.num_layers * config.sequence_length * config.width
    return 6.0 * (matrices + _active_expert_weights(model) + head) + attention


def _expert_weights(model: Transformer) -> int:
    experts = [module for module in model.layers.modules() if isinstance(module, Experts)]
    return sum(weight.numel() for module in experts for weight in (module.gate, module.up, module.out))


def _active_expert_weights(model: Transformer) -> int:
    config = model.config
    return _expert_weights(model) * config.experts_per_token // config.num_experts if config.num_experts else 0
