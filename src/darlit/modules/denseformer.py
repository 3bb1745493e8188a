"""DenseFormer as a language model."""

from __future__ import annotations

from darlit.backbone import BackboneConfig
from darlit.modules.language_module import LanguageModule
from darlit.modules.optimizer import OptimizerConfig
from darlit.pathways.denseformer import DenseFormerOptions


class DenseFormerLM(LanguageModule):
    """Weighted sums of layer outputs (arXiv 2402.02622)."""

    pathway_name = "denseformer"

    def __init__(
        self,
        pathway: DenseFormerOptions = DenseFormerOptions(),
        backbone: BackboneConfig = BackboneConfig(),
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        super().__init__(pathway, backbone, optimizer)
