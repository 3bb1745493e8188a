"""Which implementation of the pathways' numbers runs: one choice, made from an option and the tensors' kind."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal, get_args

import torch

from darlit.errors import DarlitError

Implementation = Literal["auto", "reference", "cpu", "triton"]
IMPLEMENTATIONS = get_args(Implementation)


@torch.compiler.assume_constant_result
def choose(implementation: str, device_type: str, dtype: torch.dtype) -> str:
    """What runs for tensors of this kind: ``reference``, ``cpu`` or ``triton``.

    ``auto`` is the compiled CPU path where there is a compiler, and the reference elsewhere: the Triton kernels are
    checked in the interpreter and compiled for every target, but run only where they are asked for by name.

    Raises:
        DarlitError: an unknown name, or one that cannot serve these tensors.
    """
    if implementation not in IMPLEMENTATIONS:
        raise DarlitError(f"implementation={implementation!r} is not known; choose one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "reference":
        return "reference"
    if implementation == "triton":
        if importlib.util.find_spec("triton") is None:
            raise DarlitError("implementation='triton' needs the triton package: pip install triton, or choose auto")
        triton_kernels = importlib.import_module("darlit.ops.triton_kernels")
        if not triton_kernels.supports(device_type, dtype):
            raise DarlitError(f"implementation='triton' cannot serve {dtype} on {device_type}: choose auto")
        return "triton"

    from darlit.ops import cpu

    if cpu.supports(device_type, dtype):
        return "cpu"
    if implementation == "cpu":
        raise DarlitError(f"implementation='cpu' cannot serve {dtype} on {device_type}: choose auto or reference")
    return "reference"
