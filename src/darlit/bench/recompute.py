"""What recomputing layers in the backward pass saves: a whole step of the evidence grid's shape, counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from darlit.backbone import BackboneConfig
from darlit.bench.arms import ARMS, Shape
from darlit.live_tensors import PeakMemory

SMALL = BackboneConfig(vocab_size=257, num_layers=8, width=256, num_heads=4, ffn_width=704, sequence_length=256)
TINY_MOE = BackboneConfig(
    vocab_size=257,
    num_layers=4,
    width=128,
    num_heads=4,
    ffn_width=192,
    num_experts=8,
    experts_per_token=2,
    sequence_length=128,
    tie_embeddings=False,
)
BATCH_SIZE = 8
"""Sequences of a step."""


def recompute(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Peak bytes of a training step of `small` and `tiny_moe`, layers kept and recomputed; ratio: to what is kept.

    The models have their own shapes; of ``shape`` dtype and device count.
    """
    del rounds
    rows: list[dict[str, Any]] = []
    for name, config in (("small", SMALL), ("tiny_moe", TINY_MOE)):
        for arm in ARMS:
            kept = _peak(arm, shape, config)
            recomputed = _peak(arm, shape, replace(config, checkpoint_layers=True))
            rows.append({"name": f"{name} {arm}", "peak_bytes": kept})
            rows.append({"name": f"{name} {arm} recomputed", "peak_bytes": recomputed, "ratio": recomputed / kept})
    return rows


def _peak(arm: str, shape: Shape, config: BackboneConfig) -> int:
    from darlit.bench.suites import TrainingStep

    tokens = BATCH_SIZE * config.sequence_length
    shape = replace(shape, tokens=tokens, width=config.width, layers=config.num_layers)
    work = TrainingStep(arm, shape, config)
    work()
    with PeakMemory(work.held) as peak:
        work()
    return peak.peak
