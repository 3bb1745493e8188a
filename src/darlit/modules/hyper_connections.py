"""Hyper-Connections as a language model."""

from __future__ import annotations

from darlit.backbone import BackboneConfig
from darlit.modules.language_module import LanguageModule
from darlit.modules.optimizer import OptimizerConfig
from darlit.pathways.hc import HCOptions


class HyperConnectionsLM(LanguageModule):
    """Static or dynamic Hyper-Connections of n streams (arXiv 2409.19606)."""

    pathway_name = "hyper_connections"

    def __init__(
        self,
        pathway: HCOptions = HCOptions(),
        backbone: BackboneConfig = BackboneConfig(),
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        super().__init__(pathway, backbone, optimizer)
