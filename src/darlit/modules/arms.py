"""The arms as language models: one thin class a pathway, which types its options and nothing else.

A class of your own needs no entry here: ``class_path: my_ideas.ScaledLM`` in an experiment finds it.
"""

from __future__ import annotations

import importlib

from darlit.backbone import BackboneConfig
from darlit.errors import DarlitError
from darlit.modules.language_module import LanguageModule
from darlit.modules.optimizer import OptimizerConfig
from darlit.pathways import PathwayOptions
from darlit.pathways.attnres import AttnResOptions
from darlit.pathways.dar import DarOptions
from darlit.pathways.denseformer import DenseFormerOptions
from darlit.pathways.hc import HCOptions
from darlit.pathways.mhc import MHCOptions


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


MODULES: dict[str, type[LanguageModule]] = {
    module.__name__: module
    for module in (
        ResidualLM,
        TransparentLM,
        DenseFormerLM,
        AttentionResidualLM,
        HyperConnectionsLM,
        ManifoldHyperConnectionsLM,
        DualAttentionResidualLM,
    )
}
"""By class name, as ``model.class_path`` of an experiment says it."""


def own_variant(class_path: str) -> type[LanguageModule]:
    """Import a class of your own, ``my_module.MyLM``, from the Python path or the current folder.

    Raises:
        DarlitError: no such module or class, or a class that is not a `LanguageModule`.
    """
    module_name, _, class_name = class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DarlitError(
            f"model.class_path is {class_path!r}: {error}; start darlit in the folder that holds this module, "
            "or put that folder into PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, LanguageModule)):
        raise DarlitError(f"model.class_path is {class_path!r}, which is not a darlit.modules.LanguageModule")
    return found


def known_modules() -> list[type[LanguageModule]]:
    """The classes of `MODULES`, and those of your own once imported."""
    return list(dict.fromkeys([*MODULES.values(), *LanguageModule.__subclasses__()]))
