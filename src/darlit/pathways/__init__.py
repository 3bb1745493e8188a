"""Residual pathways: one file a family, found by themselves.

A new idea is one file here that subclasses `Pathway` and sets ``name``; `build` and the tables then know it.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

from darlit.errors import DarlitError
from darlit.pathways.contract import Pathway, PathwayOptions, PathwayState, Probe, check_option

__all__ = ["Pathway", "PathwayOptions", "PathwayState", "Probe", "build", "families", "names"]


def families() -> dict[str, type[Pathway]]:
    """Every pathway class by name: those in this folder, and those of your own modules once imported."""
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)
    return {family.name: family for family in sorted(_subclasses(Pathway), key=lambda family: family.name)}


def names() -> list[str]:
    """The names that `build` accepts."""
    return list(families())


def build(
    name: str,
    *,
    num_branches: int,
    width: int,
    norm_eps: float = 1e-10,
    implementation: str = "auto",
    **options: Any,
) -> Pathway:
    """Make a pathway for any stack of branches.

    Args:
        name: one of `names`.
        num_branches: how many branches write to it, two per Transformer layer.
        width: D of every branch's input and output.
        norm_eps: eps of the key norm.
        implementation: auto, reference, cpu or triton; see `darlit.ops.dispatch`.
        options: fields of the family's ``Options``; each has a default.

    Raises:
        ValueError: an unknown name or option, or a value out of range; the message says what is allowed.
    """
    known = families()
    if name not in known:
        raise DarlitError(f"pathway={name!r} is not known; choose one of {', '.join(known)}")
    family = known[name]
    allowed = [field.name for field in dataclasses.fields(family.Options)]
    for option in options:
        if option not in allowed:
            raise DarlitError(f"{option}={options[option]!r}: {name} has no such option; it has {', '.join(allowed)}")
    check_option("implementation", implementation, implementation in family.implementations, family.implementations)
    pathway = family(num_branches, width, family.Options(**options), norm_eps)
    pathway.implementation = implementation
    return pathway


def _subclasses(base: type[Any]) -> list[type[Any]]:
    found: list[type[Any]] = []
    for family in base.__subclasses__():
        if hasattr(family, "name"):
            found.append(family)
        found += _subclasses(family)
    return found
