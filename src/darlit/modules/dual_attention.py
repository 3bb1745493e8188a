"""Dual Attention Residuals as a language model."""

from __future__ import annotations

from darlit.backbone import BackboneConfig
from darlit.modules.language_module import LanguageModule
from darlit.modules.optimizer import OptimizerConfig
from darlit.pathways.dar import DarOptions


class DualAttentionResidualLM(LanguageModule):
    """Full or Block DAR and its routing ablations (arXiv 2607.18730)."""

    pathway_name = "dar"

    def __init__(
        self,
        pathway: DarOptions = DarOptions(),
        backbone: BackboneConfig = BackboneConfig(),
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        super().__init__(pathway, backbone, optimizer)
