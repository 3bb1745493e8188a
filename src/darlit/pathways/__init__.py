"""Residual pathways: one file a family.

A new idea is one class that subclasses `Pathway` and sets ``name``, in any module: once it is defined, `build` and the
tables know it. darlit's own families are listed in `FAMILIES`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any

from darlit.errors import DarlitError
from darlit.pathways.attnres import AttnRes
from darlit.pathways.contract import DEFINED, Pathway, PathwayOptions, PathwayState, Probe, check_option
from darlit.pathways.dar import Dar
from darlit.pathways.denseformer import DenseFormer
from darlit.pathways.hc import HC
from darlit.pathways.mhc import MHC
from darlit.pathways.residual import Residual
from darlit.pathways.transparent import Transparent

__all__ = ["Pathway", "PathwayOptions", "PathwayState", "Probe", "build", "families", "family", "names"]

FAMILIES: dict[str, type[Pathway]] = {
    "attnres": AttnRes,
    "dar": Dar,
    "denseformer": DenseFormer,
    "hyper_connections": HC,
    "mhc": MHC,
    "residual": Residual,
    "transparent": Transparent,
}


def families() -> dict[str, type[Pathway]]:
    """Every pathway class by name: darlit's, then those of your own modules that were imported."""
    return {**FAMILIES, **DEFINED}


def family(name: str) -> type[Pathway]:
    """The pathway class of a name: one of `families`, or that of a file of yours beside darlit's own.

    Raises:
        DarlitError: an unknown name; the message says which are known.
    """
    if name not in families() and name.isidentifier() and importlib.util.find_spec(f"darlit.pathways.{name}"):
        importlib.import_module(f"darlit.pathways.{name}")
    known = families()
    if name not in known:
        raise DarlitError(f"pathway={name!r} is not known; choose one of {', '.join(known)}")
    return known[name]


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
    chosen = family(name)
    allowed = [field.name for field in dataclasses.fields(chosen.Options)]
    for option in options:
        if option not in allowed:
            raise DarlitError(f"{option}={options[option]!r}: {name} has no such option; it has {', '.join(allowed)}")
    check_option("implementation", implementation, implementation in chosen.implementations, chosen.implementations)
    pathway = chosen(num_branches, width, chosen.Options(**options), norm_eps)
    pathway.implementation = implementation
    return pathway
