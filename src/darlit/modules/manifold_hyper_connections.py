"""Manifold-constrained Hyper-Connections as a language model."""

from __future__ import annotations

from darlit.backbone import BackboneConfig
from darlit.modules.language_module import LanguageModule
from darlit.modules.optimizer import OptimizerConfig
from darlit.pathways.mhc import MHCOptions


class ManifoldHyperConnectionsLM(LanguageModule):
    """mHC of n streams (arXiv 2512.24880)."""

    pathway_name = "mhc"

    def __init__(
        self,
        pathway: MHCOptions = MHCOptions(),
        backbone: BackboneConfig = BackboneConfig(),
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        super().__init__(pathway, backbone, optimizer)
