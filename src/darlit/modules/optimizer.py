"""AdamW, its parameter groups, and the learning-rate schedule over the token budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from darlit.backbone.experts import Experts
from darlit.fields import check_fields, check_option


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warmup and decay, the same for all arms of a size.

    Args:
        learning_rate: peak.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        weight_decay: on the backbone's matrices only; never on pathway parameters, norms and embeddings.
        pathway_lr_multiplier: the pathway's learning rate over the backbone's.
        schedule: cosine after the warmup, or warmup_stable_decay (flat, then linear).
        warmup_fraction: share of the steps with a rising rate; the last of them has the peak.
        decay_fraction: share of the steps that warmup_stable_decay decays over.
        final_fraction: learning rate of the last step over the peak, unless the warmup takes all steps.
    """

    learning_rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    pathway_lr_multiplier: float = 1.0
    schedule: Literal["cosine", "warmup_stable_decay"] = "cosine"
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.2
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self, "optimizer.")
        for name in ("warmup_fraction", "decay_fraction", "final_fraction"):
            check_option(f"optimizer.{name}", getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("beta1", "beta2"):
            check_option(f"optimizer.{name}", getattr(self, name), 0 <= getattr(self, name) < 1, "at least 0, below 1")
        for name in ("learning_rate", "weight_decay", "pathway_lr_multiplier"):
            check_option(f"optimizer.{name}", getattr(self, name), getattr(self, name) >= 0, "at least 0")


def parameter_groups(
    backbone: Iterable[nn.Module], pathway: nn.Module, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Groups: matrices and experts with decay; embeddings and gains without; the pathway without and with its own rate.

    Experts are a group of their own as they may be split over ranks in another way than the rest.

    Args:
        backbone: modules whose parameters are the backbone's; the pathway must not be among them.
    """
    decayed: dict[int, nn.Parameter] = {}
    experts: dict[int, nn.Parameter] = {}
    plain: dict[int, nn.Parameter] = {}
    for top in backbone:
        for module in top.modules():
            matrices = (
                experts if isinstance(module, Experts) else plain if isinstance(module, nn.Embedding) else decayed
            )
            for parameter in module.parameters(recurse=False):
                group = matrices if parameter.ndim >= 2 else plain
                group[id(parameter)] = parameter
    groups: list[dict[str, Any]] = [
        {"name": "matrices", "params": list(decayed.values()), "weight_decay": config.weight_decay},
        {"name": "experts", "params": list(experts.values()), "weight_decay": config.weight_decay},
        {"name": "embeddings_and_gains", "params": list(plain.values()), "weight_decay": 0.0},
        {
            "name": "pathway",
            "params": list(pathway.parameters()),
            "weight_decay": 0.0,
            "lr": config.learning_rate * config.pathway_lr_multiplier,
        },
    ]
    return [group for group in groups if group["params"]]


def schedule_factor(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """The learning rate over its peak, as a function of the number of optimiser steps taken before.

    The n-th of T steps (n = 1 ... T) has n / warmup in the warmup and ``final_fraction`` at n = T.
    """
    warmup_steps = max(1, round(config.warmup_fraction * total_steps))
    decay_steps = max(1, round(config.decay_fraction * total_steps))
    floor = config.final_fraction

    def cosine(number: int) -> float:
        progress = (number - warmup_steps) / (total_steps - warmup_steps)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    def stable_decay(number: int) -> float:
        return min(1.0, floor + (1 - floor) * (total_steps - number) / decay_steps)

    after_warmup = cosine if config.schedule == "cosine" else stable_decay

    def factor(taken: int) -> float:
        number = min(taken + 1, total_steps)  # torch asks for one step after the last
        return number / warmup_steps if number <= warmup_steps else after_warmup(number)

    return factor
