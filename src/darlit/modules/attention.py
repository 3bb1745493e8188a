"""Attention Residuals as a language model."""

from __future__ import annotations

from darlit.backbone import BackboneConfig
from darlit.modules.language_module import LanguageModule
from darlit.modules.optimizer import OptimizerConfig
from darlit.pathways.attnres import AttnResOptions


class AttentionResidualLM(LanguageModule):
    """Full or Block AttnRes (arXiv 2603.15031)."""

    pathway_name = "attnres"

    def __init__(
        self,
        pathway: AttnResOptions = AttnResOptions(),
        backbone: BackboneConfig = BackboneConfig(),
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        super().__init__(pathway, backbone, optimizer)
