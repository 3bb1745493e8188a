"""What megablocks imports as compiled modules, in PyTorch, for machines where those are not built.

megablocks 0.10 imports ``megablocks_ops`` (counting and sorting) and ``grouped_gemm`` (products grouped by expert).
Neither builds against a current PyTorch without patches, and PyTorch has operators for all of it. A compiled module
that is installed is left in place.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor

from darlit.backbone.experts.grouped import grouped_product


def provide() -> None:
    """Make both modules importable."""
    if not _importable("megablocks_ops"):
        sys.modules["megablocks_ops"] = _module("megablocks_ops", histogram, inclusive_cumsum, exclusive_cumsum, sort)
    if not _importable("grouped_gemm"):
        operators, backend = _module("grouped_gemm.ops", gmm), _module("grouped_gemm.backend", gmm)
        package = _module("grouped_gemm")
        package.__dict__.update(ops=operators, backend=backend)
        sys.modules.update({"grouped_gemm": package, "grouped_gemm.ops": operators, "grouped_gemm.backend": backend})


def histogram(x: Tensor, bins: int) -> Tensor:
    """How often each of ``0 .. bins - 1`` is in ``x`` ``[A]``: int32 ``[bins]``."""
    return torch.bincount(x.flatten(), minlength=int(bins)).to(torch.int32)


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Running sums of ``x`` into ``out``."""
    torch.cumsum(x, dim, dtype=out.dtype, out=out)


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Running sums of what lies before each element, into ``out``."""
    out.copy_(x.cumsum(dim) - x)


def sort(x: Tensor, end_bit: int, out: Tensor, order: Tensor) -> None:
    """Stable sort of ``x`` ``[A]`` into ``out``, and where each value came from into ``order``.

    ``end_bit``: how many bits a radix sort would have to look at; of no use here.
    """
    del end_bit
    values, places = x.sort(stable=True)
    out.copy_(values)
    order.copy_(places)


def gmm(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False, c: Tensor | None = None
) -> Tensor:
    """Matrix products of A consecutive rows in E groups of ``batch_sizes`` ``[E]``; written to ``c`` if given.

    ``[A, m] x [E, m, n] -> [A, n]`` (``trans_b``: b is ``[E, n, m]``), or with ``trans_a``
    ``[A, m] x [A, n] -> [E, m, n]``.
    """
    ends_E = batch_sizes.to(a.device).cumsum(0, dtype=torch.int32)
    left, right = (a.mT, b) if trans_a else (a, b.mT if trans_b else b)
    product = grouped_product(left, right, ends_E)
    return product if c is None else c.copy_(product.view_as(c))


def _importable(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _module(name: str, *functions: object) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update({function.__name__: function for function in functions})  # type: ignore[attr-defined]
    return module
