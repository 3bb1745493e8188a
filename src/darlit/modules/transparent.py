"""Transparent attention as a language model."""

from __future__ import annotations

from darlit.backbone import BackboneConfig
from darlit.modules.language_module import LanguageModule
from darlit.modules.optimizer import OptimizerConfig
from darlit.pathways import PathwayOptions


class TransparentLM(LanguageModule):
    """Softmax mixtures of layer outputs (arXiv 1808.07561), decoder only."""

    pathway_name = "transparent"

    def __init__(
        self,
        pathway: PathwayOptions = PathwayOptions(),
        backbone: BackboneConfig = BackboneConfig(),
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        super().__init__(pathway, backbone, optimizer)
