"""The standard residual as a language model."""

from __future__ import annotations

from darlit.backbone import BackboneConfig
from darlit.modules.language_module import LanguageModule
from darlit.modules.optimizer import OptimizerConfig
from darlit.pathways import PathwayOptions


class ResidualLM(LanguageModule):
    """``x <- x + f(x)``: the baseline of every comparison."""

    pathway_name = "residual"

    def __init__(
        self,
        pathway: PathwayOptions = PathwayOptions(),
        backbone: BackboneConfig = BackboneConfig(),
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        super().__init__(pathway, backbone, optimizer)
