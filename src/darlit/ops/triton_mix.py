# mypy: disable-error-code="no-untyped-def, assignment"
"""Mixtures of widened streams for a GPU; see `darlit.ops.cpu` for the arguments.

Addresses and row distances of the streams are arguments of the kernels, tuples of fixed length: a call copies nothing
to the device. A warp owns one token and `BLOCK` channels at a time, so a product of two rows is summed within the warp
and rows of any width are served. Coefficients are read again at every block, from the cache.

Shapes: T tokens and D channels of a tile, S sources, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.triton_rows import aligned, pointers, token_stride

TOKENS, WARPS = 4, 4
MANY = 40
"""More sums of products than this leave a thread half of its channels."""

VARYING = ["tokens", "strides", "coefficients_row"]
"""Numbers that differ between calls of one model: not worth a compilation each. ``ALIGNED`` says what matters."""


@triton.jit
def tile_of(tensors, strides, entry, token_T, column_D, dtype: tl.constexpr, ALIGNED: tl.constexpr, EACH: tl.constexpr):
    """Pointers ``[T, D]`` into one tensor of the tuple."""
    return pointers(tensors[entry], strides[entry * EACH], token_T, dtype, ALIGNED)[:, None] + column_D[None, :]


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["tensors"])
def stream_mix_kernel(
    tensors,  # S sources, O outputs
    strides,
    coefficients,
    kind,  # one element of the streams' dtype
    tokens,
    width,
    coefficients_row,
    S: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    ALIGNED: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out_o = sum_s c[o, s] source_s``."""
    dtype: tl.constexpr = kind.dtype.element_ty
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_TD = alive_T[:, None] & (column_D < width)[None, :]
    sources = ()
    for s in tl.static_range(S):
        pointer_TD = tile_of(tensors, strides, s, token_T, column_D, dtype, ALIGNED, EACH)
        sources += (tl.load(pointer_TD, mask=mask_TD, other=0.0).to(tl.float32),)
    for o in tl.static_range(O):
        out_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
        for s in tl.static_range(S):
            entry_T = coefficients + token_T.to(tl.int64) * coefficients_row + o * S + s
            out_TD += tl.load(entry_T, mask=alive_T, other=0.0)[:, None] * sources[s]
        pointer_TD = tile_of(tensors, strides, S + o, token_T, column_D, dtype, ALIGNED, EACH)
        tl.store(pointer_TD, out_TD.to(dtype), mask=mask_TD)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["tensors"])
def stream_mix_backward_kernel(
    tensors,  # O gradients, S sources, S gradients of the sources (none of these without GRADIENTS)
    strides,
    coefficients,
    coefficients_gradient,
    kind,
    tokens,
    width,
    coefficients_row,
    S: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    GRADIENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """``dsource_s = sum_o c[o, s] g_o`` and ``dc[o, s] = <g_o, source_s>``: every row is loaded once."""
    dtype: tl.constexpr = kind.dtype.element_ty
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    row_T = coefficients + token_T.to(tl.int64) * coefficients_row
    sums = ()
    for _ in tl.static_range(S * O):
        sums += (tl.zeros([TOKENS, BLOCK // VECTOR], tl.float32),)
    for begin in range(0, width, BLOCK):
        column_D = begin + tl.arange(0, BLOCK)
        mask_TD = alive_T[:, None] & (column_D < width)[None, :]
        gradients = ()
        for o in tl.static_range(O):
            pointer_TD = tile_of(tensors, strides, o, token_T, column_D, dtype, ALIGNED, EACH)
            gradients += (tl.load(pointer_TD, mask=mask_TD, other=0.0).to(tl.float32),)
        added = ()
        for s in tl.static_range(S):
            pointer_TD = tile_of(tensors, strides, O + s, token_T, column_D, dtype, ALIGNED, EACH)
            source_TD = tl.load(pointer_TD, mask=mask_TD, other=0.0).to(tl.float32)
            gradient_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
            for o in tl.static_range(O):
                product_TDV = tl.reshape(source_TD * gradients[o], [TOKENS, BLOCK // VECTOR, VECTOR])
                added += (sums[s * O + o] + tl.sum(product_TDV, axis=2),)
                if GRADIENTS:
                    gradient_TD += tl.load(row_T + o * S + s, mask=alive_T, other=0.0)[:, None] * gradients[o]
            if GRADIENTS:
                pointer_TD = tile_of(tensors, strides, O + S + s, token_T, column_D, dtype, ALIGNED, EACH)
                tl.store(pointer_TD, gradient_TD.to(dtype), mask=mask_TD)
        sums = added
    for s in tl.static_range(S):
        for o in tl.static_range(O):
            entry_T = coefficients_gradient + token_T * O * S + o * S + s
            tl.store(entry_T, tl.sum(sums[s * O + o], axis=1), mask=alive_T)


def mix_tile(width: int, dtype: torch.dtype, sums: int = 0) -> dict[str, int]:
    """Channels of a block: 16 bytes a thread, or half of that where registers hold many sums."""
    of_thread = min(16 // dtype.itemsize, 4 if sums > MANY else 8)
    return {"TOKENS": TOKENS, "BLOCK": min(32 * of_thread, triton.next_power_of_2(width))}


def by_address(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """What the kernels take of ``[N, D]`` tensors: themselves, and the distance between rows, one if all agree."""
    strides = tuple(x.stride(0) for x in tensors)
    differ = len(set(strides)) > 1
    return {
        "tensors": tuple(tensors),
        "strides": strides if differ else strides[:1],
        "EACH": int(differ),
        "ALIGNED": aligned(tensors),
    }


def stream_mix(sources: Sequence[Tensor], coefficients: Tensor, mixed: Sequence[Tensor]) -> None:
    """See `darlit.ops.cpu.stream_mix`."""
    tokens, width = sources[0].shape
    tensors, tile = [*sources, *mixed], mix_tile(width, sources[0].dtype)
    stream_mix_kernel[(triton.cdiv(tokens, TOKENS), triton.cdiv(width, tile["BLOCK"]))](
        **by_address(tensors),
        coefficients=coefficients,
        kind=sources[0],
        tokens=tokens,
        width=width,
        coefficients_row=token_stride(coefficients),
        S=len(sources),
        O=len(mixed),
        **tile,
        num_warps=WARPS,
    )


def stream_mix_backward(
    gradients: Sequence[Tensor],
    sources: Sequence[Tensor],
    coefficients: Tensor,
    source_gradients: Sequence[Tensor],
    coefficients_gradient: Tensor,
) -> None:
    """See `darlit.ops.cpu.stream_mix_backward`."""
    tokens, width = sources[0].shape
    tensors, tile = (
        [*gradients, *sources, *source_gradients],
        mix_tile(width, sources[0].dtype, len(gradients) * len(sources)),
    )
    stream_mix_backward_kernel[(triton.cdiv(tokens, TOKENS),)](
        **by_address(tensors),
        coefficients=coefficients,
        coefficients_gradient=coefficients_gradient,
        kind=sources[0],
        tokens=tokens,
        width=width,
        coefficients_row=token_stride(coefficients),
        S=len(sources),
        O=len(gradients),
        GRADIENTS=bool(source_gradients),
        **tile,
        VECTOR=max(1, tile["BLOCK"] // 32),
        num_warps=WARPS,
    )
