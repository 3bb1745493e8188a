"""LightningModules: one base, and one thin class per pathway in `darlit.modules.arms`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from darlit.modules.budget import Budget
    from darlit.modules.language_module import LanguageModule
    from darlit.modules.optimizer import OptimizerConfig

_HOMES = {"Budget": "budget", "LanguageModule": "language_module", "OptimizerConfig": "optimizer"}

__all__ = ["Budget", "LanguageModule", "OptimizerConfig"]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: configurations are read without Lightning, which takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
