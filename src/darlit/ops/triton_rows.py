# mypy: disable-error-code="no-untyped-def"
"""What the Triton kernels share: rows reached through a table of addresses, and launching.

A program owns TOKENS whole rows, so every sum over the width stays in registers and each stream is read once. All
arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 8192


@triton.jit
def pointers(address, stride, token_T, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers ``[TOKENS]`` from an address or a pointer; aligned ones may be loaded and stored 16 bytes at a time."""
    if ALIGNED:  # in arithmetic where it is an argument, whose hint would not survive inlining
        base = tl.multiple_of((address.to(tl.int64) // 16 * 16).to(tl.pointer_type(dtype)), 16)
        stride = stride // 16 * 16
    else:
        base = address.to(tl.pointer_type(dtype))
    return base + token_T.to(tl.int64) * stride


@triton.jit
def load_rows(tensor, stride, token_T, column_D, mask_TD, ALIGNED: tl.constexpr):
    """``[TOKENS, BLOCK]`` of a tensor in float32, zero where masked."""
    pointer_T = pointers(tensor.to(tl.int64), stride, token_T, tensor.dtype.element_ty, ALIGNED)
    return tl.load(pointer_T[:, None] + column_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)


@triton.jit
def store_rows(tensor, stride, token_T, column_D, mask_TD, value_TD, ALIGNED: tl.constexpr):
    pointer_T = pointers(tensor.to(tl.int64), stride, token_T, tensor.dtype.element_ty, ALIGNED)
    tl.store(pointer_T[:, None] + column_D[None, :], value_TD.to(tensor.dtype.element_ty), mask=mask_TD)


def tile(width: int) -> tuple[int, int, int]:
    """TOKENS and BLOCK of a program, and its warps: about two thousand elements of a stream, at least one row."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(4, 2048 // block))
    return rows, block, max(1, min(16, rows * block // 256))


def check_width(width: int) -> None:
    if width > MAX_WIDTH:
        raise ValueError(f"width={width}: the Triton kernels take up to {MAX_WIDTH}; choose implementation='reference'")


def launch(kernel: Any, like: Tensor, *arguments: object, **constants: object) -> None:
    width = like.shape[-1]
    tokens = like.numel() // width
    check_width(width)
    rows, block, warps = tile(width)
    kernel[(triton.cdiv(tokens, rows),)](*arguments, **constants, TOKENS=rows, BLOCK=block, num_warps=warps)


def by_address(tensors: Sequence[Tensor | None], like: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tensors and their distances between rows; ``like`` stands in for what a kernel does not touch."""
    there = tuple(like if x is None else x for x in tensors)
    return there, tuple(x.stride(-2) for x in there)


def aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Whether every row starts on 16 bytes at a distance of 16 elements, so that loads may be wide."""
    return all(x is None or (x.data_ptr() % 16 == 0 and x.stride(-2) % 16 == 0) for x in tensors)


def bits(values: Sequence[int], each: int = 1) -> int:
    """Small numbers in one, ``each`` bits for each."""
    return sum(int(value) << each * place for place, value in enumerate(values))


def token_stride(gate: Tensor | None) -> int:
    return 0 if gate is None or gate.dim() == 1 else gate.stride(0)
