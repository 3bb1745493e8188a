"""What is counted from shapes: parameters, those that a token meets, and FLOPs."""

from __future__ import annotations

import torch

from darlit import pathways
from darlit.backbone import BackboneConfig, Transformer
from darlit.backbone.sizes import parameter_counts, training_flops_per_token

SHAPE = BackboneConfig(vocab_size=97, num_layers=3, width=32, num_heads=4, ffn_width=48, sequence_length=24)
SPARSE = BackboneConfig(
    **{**vars(SHAPE), "num_experts": 8, "experts_per_token": 2, "ffn_width": 16, "tie_embeddings": False}
)


def build(config: BackboneConfig, pathway: str = "residual") -> Transformer:
    return Transformer(config, pathways.build(pathway, num_branches=config.num_branches, width=config.width))


def test_dense_flops_follow_the_shapes() -> None:
    matrices = 3 * (32 * 96 + 32 * 32 + 32 * 96 + 48 * 32)
    assert training_flops_per_token(build(SHAPE, "dar")) == 6 * (matrices + 97 * 32) + 6 * 3 * 24 * 32


def test_a_token_meets_k_experts_and_all_else() -> None:
    model = build(SPARSE)
    one_expert = 3 * 16 * 32
    total = sum(parameter.numel() for parameter in model.parameters())
    counts = parameter_counts(model)
    assert counts == (total, total - 3 * 6 * one_expert, 0)
    matrices = 3 * (32 * 96 + 32 * 32 + 32 * 8 + 2 * one_expert)
    assert training_flops_per_token(model) == 6 * (matrices + 97 * 32) + 6 * 3 * 24 * 32


def test_dense_models_are_all_active() -> None:
    counts = parameter_counts(build(SHAPE, "dar"))
    assert counts.active == counts.total
    assert 0 < counts.pathway < counts.total


def test_the_sparse_model_of_the_paper() -> None:
    """OLMoE's shape, arXiv 2409.02060: 6.9 B parameters, 1.3 B of them active."""
    config = BackboneConfig(
        vocab_size=50304,
        num_layers=16,
        width=2048,
        num_heads=16,
        ffn_width=1024,
        num_experts=64,
        experts_per_token=8,
        sequence_length=2048,
        tie_embeddings=False,
    )
    with torch.device("meta"):
        counts = parameter_counts(build(config))
    layer = 2048 * 4 * 2048 + 2 * 2048 + 2 * 128 + 64 * 2048
    assert counts.total == 2 * 50304 * 2048 + 2048 + 16 * (layer + 64 * 3 * 1024 * 2048)
    assert counts.active == 2 * 50304 * 2048 + 2048 + 16 * (layer + 8 * 3 * 1024 * 2048)
