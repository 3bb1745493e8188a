"""Which implementation of the pathways' numbers runs: one choice, made from an option and the tensors' kind."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Literal, get_args

import torch

from darlit.errors import DarlitError

Implementation = Literal["auto", "reference", "cpu", "triton"]
IMPLEMENTATIONS = get_args(Implementation)


def backend(implementation: str) -> ModuleType:
    """The module with the kernels: ``cpu``, ``triton``, or ``shapes``, which computes nothing."""
    name = {"cpu": "cpu", "triton": "triton_kernels", "shapes": "shapes"}[implementation]
    return importlib.import_module(f"darlit.ops.{name}")


@torch.compiler.assume_constant_result
def choose(
    implementation: str, device_type: str, dtype: torch.dtype, available: tuple[str, ...] = IMPLEMENTATIONS
) -> str:
    """What runs for tensors of this kind: ``reference``, ``cpu`` or ``triton``.

    ``auto`` takes the first of the ``available`` ones that can: the Triton kernels on an NVIDIA GPU, the compiled CPU
    path where there is a compiler, the reference everywhere else.

    Raises:
        DarlitError: an unknown name, or one that cannot serve these tensors.
    """
    if implementation not in IMPLEMENTATIONS:
        raise DarlitError(f"implementation={implementation!r} is not known; choose one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "reference":
        return "reference"
    for name in ("triton", "cpu") if implementation == "auto" else (implementation,):
        if name in available and _serves(name, device_type, dtype, asked=implementation == name):
            return name
    if implementation == "auto":
        return "reference"
    raise DarlitError(
        f"implementation={implementation!r} cannot serve {dtype} on {device_type}: choose auto or reference"
    )


def _serves(name: str, device_type: str, dtype: torch.dtype, *, asked: bool) -> bool:
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            if asked:
                raise DarlitError(
                    "implementation='triton' needs the triton package: pip install triton, or choose auto"
                )
            return False
        if device_type == "cpu" and not asked:
            return False  # Triton's interpreter is there to be tested, not to be used
    elif device_type != "cpu":
        return False
    module = "triton_kernels" if name == "triton" else "cpu"
    return importlib.import_module(f"darlit.ops.{module}").supports(device_type, dtype)
