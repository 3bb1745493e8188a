"""A backbone on a pathway, from names and options: what a training module and a plan both build."""

from __future__ import annotations

from dataclasses import asdict

import torch

from darlit import pathways
from darlit.backbone.config import BackboneConfig
from darlit.backbone.transformer import Transformer
from darlit.pathways import PathwayOptions


def build_transformer(pathway: str, options: PathwayOptions, config: BackboneConfig) -> Transformer:
    """Make the model of an arm, on the device that new tensors have.

    Args:
        pathway: a name that `darlit.pathways.build` knows.
        options: the pathway's.
        config: the backbone's; its ``implementation`` is the pathway's.

    Raises:
        DarlitError: an implementation that the pathway does not have.
    """
    with torch.random.fork_rng(devices=[]):  # what it draws here moves no weight of the backbone
        module = pathways.build(
            pathway,
            num_branches=config.num_branches,
            width=config.width,
            norm_eps=config.norm_eps,
            implementation=config.implementation,
            **asdict(options),
        )
    return Transformer(config, module)
