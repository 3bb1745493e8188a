"""LightningModules: one base, one thin class per residual variant, found by themselves."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from darlit.modules.budget import Budget
    from darlit.modules.language_module import LanguageModule
    from darlit.modules.optimizer import OptimizerConfig

_HOMES = {"Budget": "budget", "LanguageModule": "language_module", "OptimizerConfig": "optimizer"}

__all__ = ["Budget", "LanguageModule", "OptimizerConfig", "variants"]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: configurations are read without Lightning, which takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def variants() -> dict[str, type[LanguageModule]]:
    """Every variant by class name, those in this folder and those of your own modules once imported."""
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)
    from darlit.modules.language_module import LanguageModule

    return {variant.__name__: variant for variant in LanguageModule.__subclasses__()}
