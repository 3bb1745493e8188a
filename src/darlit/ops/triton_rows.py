# mypy: disable-error-code="no-untyped-def"
"""What the Triton kernels share: rows reached through a table of addresses, and launching.

A program owns TOKENS whole rows, so every sum over the width stays in registers and each stream is read once. All
arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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
def row_of(table, entry, token_T, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to the rows of the tensors whose address and row distance are the table's ``entry``; one of the two may
    be many."""
    return pointers(tl.load(table + 2 * entry), tl.load(table + 2 * entry + 1), token_T, dtype, ALIGNED)


@triton.jit
def load_rows(table, entry, token_T, column_D, mask_TD, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """``[TOKENS, BLOCK]`` in float32, zero where masked."""
    pointer_TD = row_of(table, entry, token_T, dtype, ALIGNED)[:, None] + column_D[None, :]
    return tl.load(pointer_TD, mask=mask_TD, other=0.0).to(tl.float32)


@triton.jit
def store_rows(table, entry, token_T, column_D, mask_TD, value_TD, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer_TD = row_of(table, entry, token_T, dtype, ALIGNED)[:, None] + column_D[None, :]
    tl.store(pointer_TD, value_TD.to(dtype), mask=mask_TD)


def tile(width: int) -> tuple[int, int, int]:
    """TOKENS and BLOCK of a program, and its warps: about two thousand elements of a stream, at least one row."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(4, 2048 // block))
    return rows, block, max(1, min(16, rows * block // 256))


def check_width(width: int) -> None:
    if width > MAX_WIDTH:
        raise ValueError(f"width={width}: the Triton kernels take up to {MAX_WIDTH}; choose implementation='reference'")


def launch(kernel: Any, like: Tensor, *arguments: object, **constants: object) -> None:
    tokens, width = like.shape
    check_width(width)
    rows, block, warps = tile(width)
    kernel[(triton.cdiv(tokens, rows),)](*arguments, **constants, TOKENS=rows, BLOCK=block, num_warps=warps)


def addresses(tensors: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Address and distance between rows of each; zeros for one that does not exist."""
    return numbers([n for x in tensors for n in ((0, 0) if x is None else (x.data_ptr(), x.stride(0)))], like)


def numbers(values: Sequence[int], like: Tensor) -> Tensor:
    """int64 on the device of ``like``, copied without waiting for it."""
    return torch.tensor(values or [0], dtype=torch.int64, pin_memory=like.is_cuda).to(like.device, non_blocking=True)


def aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Whether every row starts on 16 bytes at a distance of 16 elements, so that loads may be wide."""
    return all(x is None or (x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0) for x in tensors)


def bits(values: Sequence[int], each: int = 1) -> int:
    """Small numbers in one, ``each`` bits for each."""
    return sum(int(value) << each * place for place, value in enumerate(values))


def token_stride(gate: Tensor | None) -> int:
    return 0 if gate is None or gate.dim() == 1 else gate.stride(0)
