"""LightningModules: one base, one thin class per residual variant, found by themselves."""

from __future__ import annotations

import importlib
import pkgutil

from darlit.modules.budget import Budget
from darlit.modules.language_module import LanguageModule
from darlit.modules.optimizer import OptimizerConfig

__all__ = ["Budget", "LanguageModule", "OptimizerConfig", "variants"]


def variants() -> dict[str, type[LanguageModule]]:
    """Every variant by class name, those in this folder and those of your own modules once imported."""
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)
    return {variant.__name__: variant for variant in LanguageModule.__subclasses__()}
