"""Entropy, largest weight and gates by layer."""

from __future__ import annotations

import math

import pytest
import torch

from darlit import pathways
from darlit.backbone import BackboneConfig, Transformer
from darlit.callbacks.pathway_health import HealthProbe

CONFIG = BackboneConfig(vocab_size=50, num_layers=2, width=16, num_heads=2, ffn_width=24, sequence_length=8)


def health(name: str, **options: object) -> dict[str, float]:
    pathway = pathways.build(name, num_branches=4, width=16, **options)
    probe = HealthProbe()
    with torch.no_grad():
        Transformer(CONFIG, pathway).hidden(torch.randint(0, 50, (2, 8)), probe)
    return probe.means()


def test_uniform_reads_have_the_entropy_of_their_number_of_sources() -> None:
    means = health("attnres")
    assert means["entropy/layer_00"] == pytest.approx(math.log(2))
    assert means["entropy/layer_01"] == pytest.approx((math.log(3) + math.log(4)) / 2)
    assert means["entropy/layer_02"] == pytest.approx(math.log(5))
    assert means["largest_weight/layer_02"] == pytest.approx(1 / 5)


def test_gates_show_their_initial_values() -> None:
    means = health("dar")
    assert means["alpha"] == pytest.approx(0.5)
    assert means["rho/layer_01"] == pytest.approx(1 / (1 + math.exp(-3)))
    assert means["beta/layer_00"] == pytest.approx(1.0)


def test_a_pathway_without_reads_has_nothing_to_show() -> None:
    assert health("residual") == {}
