# mypy: disable-error-code="no-untyped-def"
"""Projections of normalised streams for a GPU; see `darlit.ops.cpu` for the arguments.

Forward, a program owns some tokens and reads their streams once, for the products and for the norm. Backward, a
program owns some channels of one stream and a share of the tokens: the weights and their gradient stay
with it, and one pass over the rows gives the gradients of both. The gradients of the weights by programs are then
added in a fixed order, so a step repeats bit-exactly.

Products run on the matrix units and add up in float32. Narrow streams are exact in the type that multiplies them;
weights, which are float32, go in as the sum of two narrow numbers, or as TF32 where the result is narrow. Float32
streams take three TF32 products (`tf32x3`).

Shapes: T tokens and D channels of a tile, C rows of weights, padded to a power of two.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.triton_mix import by_address, tile_of
from darlit.ops.triton_rows import pointers

WARPS = 8
PROGRAMS = 528
"""Programs that keep a large GPU busy in the backward pass: four for each of 132 multiprocessors."""

VARYING = ["tokens", "strides"]


@triton.jit
def stream_of(tensors, strides, first: tl.constexpr, entry, COUNT: tl.constexpr, EACH: tl.constexpr):
    """One of ``COUNT`` tensors of the tuple, by a number that is known when the program runs."""
    address, stride = tensors[first].to(tl.int64), strides[first * EACH]
    for i in tl.static_range(1, COUNT):
        address = tl.where(entry == i, tensors[first + i].to(tl.int64), address)
        if EACH:
            stride = tl.where(entry == i, strides[first + i], stride)
    return address, stride


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["tensors"])
def vector_logits_kernel(
    tensors,  # G * M streams
    strides,
    weights,
    logits,
    scale,
    kind,  # one element of the streams' dtype
    eps,
    tokens,
    width,
    C: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``logit_c = scale sum_m <w[c, m], x_m>``, ``scale = 1 / rms`` of all M D channels."""
    dtype: tl.constexpr = kind.dtype.element_ty
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    group = tl.program_id(1)
    row_C = tl.arange(0, ROWS)
    logit_TC = tl.zeros([TOKENS, ROWS], tl.float32)
    squares_T = tl.zeros([TOKENS], tl.float32)
    for m in range(M):
        address, stride = stream_of(tensors, strides, 0, group * M + m, G * M, EACH)
        x_T1 = pointers(address, stride, token_T, dtype, ALIGNED)[:, None]
        w_1C = weights + ((row_C * M + m) * width)[None, :]
        for begin in range(0, width, BLOCK):
            column_D = begin + tl.arange(0, BLOCK)
            in_width_D = column_D < width
            x_TD = tl.load(x_T1 + column_D[None, :], mask=alive_T[:, None] & in_width_D[None, :], other=0.0)
            w_DC = tl.load(w_1C + column_D[:, None], mask=in_width_D[:, None] & (row_C < C)[None, :], other=0.0)
            wide_TD = x_TD.to(tl.float32)
            squares_T += tl.sum(wide_TD * wide_TD, axis=1)
            if PRECISION == "narrow":
                high_DC = w_DC.to(dtype)
                logit_TC = tl.dot(x_TD, high_DC, logit_TC)
                logit_TC = tl.dot(x_TD, (w_DC - high_DC.to(tl.float32)).to(dtype), logit_TC)
            else:
                logit_TC = tl.dot(wide_TD, w_DC, logit_TC, input_precision=PRECISION)
    scale_T = tl.rsqrt(squares_T / (M * width) + eps)
    token_T = group * tokens + token_T.to(tl.int64)
    tl.store(scale + token_T, scale_T, mask=alive_T)
    mask_TC = alive_T[:, None] & (row_C < C)[None, :]
    tl.store(logits + token_T[:, None] * C + row_C[None, :], logit_TC * scale_T[:, None], mask=mask_TC)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["tensors"])
def vector_logits_backward_kernel(
    tensors,  # S = G * M streams, S gradients of theirs, S gradients that arrived and that of the mixture, if any
    strides,
    gradient,
    logits,
    scale,
    weights,
    coefficients,
    partial_gradients,  # of the weights, one for each group and each of the programs that share a block of channels
    kind,
    tokens,
    width,
    C: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    ARRIVED: tl.constexpr,
    MIXED: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``dx_m = arrived_m + c_m g + sum_c dlogit_c dlogit_c/dx_m`` and ``dw``."""
    dtype: tl.constexpr = kind.dtype.element_ty
    S: tl.constexpr = G * M
    stream = tl.program_id(0) % S  # side by side: they read the same rows of g
    group, m = stream // M, stream % M
    column_D = tl.program_id(0) // S * BLOCK + tl.arange(0, BLOCK)
    row_C = tl.arange(0, ROWS)
    in_width_D, in_rows_C = column_D < width, row_C < C
    mask_CD = in_rows_C[:, None] & in_width_D[None, :]
    offset_CD = ((row_C * M + m) * width)[:, None] + column_D[None, :]
    w_CD = tl.load(weights + offset_CD, mask=mask_CD, other=0.0)
    dw_CD = tl.zeros([ROWS, BLOCK], tl.float32)
    address, stride = stream_of(tensors, strides, 0, stream, S, EACH)
    to_address, to_stride = stream_of(tensors, strides, S, stream, S, EACH)
    if ARRIVED:
        from_address, from_stride = stream_of(tensors, strides, 2 * S, stream, S, EACH)
    for begin in range(tl.program_id(1) * TOKENS, tokens, tl.num_programs(1) * TOKENS):
        token_T = begin + tl.arange(0, TOKENS)
        alive_T = token_T < tokens
        mask_TD = alive_T[:, None] & in_width_D[None, :]
        of_group_T = group * tokens + token_T.to(tl.int64)
        offset_TC = of_group_T[:, None] * C + row_C[None, :]
        mask_TC = alive_T[:, None] & in_rows_C[None, :]
        gradient_TC = tl.load(gradient + offset_TC, mask=mask_TC, other=0.0)
        through_T = tl.sum(gradient_TC * tl.load(logits + offset_TC, mask=mask_TC, other=0.0), axis=1)
        scale_T = tl.load(scale + of_group_T, mask=alive_T, other=0.0)
        product_TC = gradient_TC * scale_T[:, None]
        x_TD = tl.load(
            pointers(address, stride, token_T, dtype, ALIGNED)[:, None] + column_D[None, :], mask=mask_TD, other=0.0
        ).to(tl.float32)
        dw_CD = tl.dot(tl.trans(product_TC), x_TD, dw_CD, input_precision=PRECISION)
        dx_TD = (-through_T * scale_T * scale_T / (M * width))[:, None] * x_TD
        dx_TD = tl.dot(product_TC, w_CD, dx_TD, input_precision=PRECISION)
        if ARRIVED:
            pointer_T = pointers(from_address, from_stride, token_T, dtype, ALIGNED)
            dx_TD += tl.load(pointer_T[:, None] + column_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)
        if MIXED:
            pointer_TD = tile_of(tensors, strides, (3 if ARRIVED else 2) * S, token_T, column_D, dtype, ALIGNED, EACH)
            c_T = tl.load(coefficients + token_T * S + stream, mask=alive_T, other=0.0)
            dx_TD += c_T[:, None] * tl.load(pointer_TD, mask=mask_TD, other=0.0).to(tl.float32)
        pointer_T = pointers(to_address, to_stride, token_T, dtype, ALIGNED)
        tl.store(pointer_T[:, None] + column_D[None, :], dx_TD.to(dtype), mask=mask_TD)
    partial_gradients += (tl.program_id(1) * G + group).to(tl.int64) * C * M * width
    tl.store(partial_gradients + offset_CD, dw_CD, mask=mask_CD)


def vector_logits(streams: Sequence[Tensor], weights_CMD: Tensor, eps: float, logits: Tensor, scale: Tensor) -> None:
    """See `darlit.ops.cpu.vector_logits`."""
    tokens, width = streams[0].shape
    rows, together, _ = weights_CMD.shape
    tile = logits_tile(rows, streams[0].dtype)
    vector_logits_kernel[(triton.cdiv(tokens, tile["TOKENS"]), len(streams) // together)](
        **by_address(streams),
        weights=weights_CMD,
        logits=logits,
        scale=scale,
        kind=streams[0],
        eps=eps,
        tokens=tokens,
        width=width,
        C=rows,
        M=together,
        G=len(streams) // together,
        PRECISION=precision(streams[0], narrow="narrow"),
        **tile,
        num_warps=WARPS,
    )


def vector_logits_backward(
    gradient: Tensor,
    logits: Tensor,
    scale: Tensor,
    streams: Sequence[Tensor],
    weights_CMD: Tensor,
    stream_gradients: Sequence[Tensor],
    weights_gradient: Tensor,
    arrived: Sequence[Tensor] = (),
    coefficients: Tensor | None = None,
    mixed_gradient: Tensor | None = None,
) -> None:
    """See `darlit.ops.cpu.vector_logits_backward`."""
    tokens, width = streams[0].shape
    rows, together, _ = weights_CMD.shape
    groups = len(streams) // together
    tensors = [*streams, *stream_gradients, *arrived, *([] if mixed_gradient is None else [mixed_gradient])]
    tile = backward_tile(rows, streams[0].dtype)
    blocks = len(streams) * triton.cdiv(width, tile["BLOCK"])
    sharing = max(1, min(triton.cdiv(tokens, tile["TOKENS"]), PROGRAMS // blocks))
    partial = weights_gradient
    if sharing * groups > 1:
        partial = weights_gradient.new_empty(sharing * groups, *weights_gradient.shape)
    vector_logits_backward_kernel[(blocks, sharing)](
        **by_address(tensors),
        gradient=gradient,
        logits=logits,
        scale=scale,
        weights=weights_CMD,
        coefficients=scale if coefficients is None else coefficients,
        partial_gradients=partial,
        kind=streams[0],
        tokens=tokens,
        width=width,
        C=rows,
        M=together,
        G=groups,
        ARRIVED=bool(arrived),
        MIXED=mixed_gradient is not None,
        PRECISION=precision(streams[0], narrow="tf32"),
        **tile,
        num_warps=WARPS,
    )
    if partial is not weights_gradient:
        torch.sum(partial, 0, out=weights_gradient)


def logits_tile(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Rows of weights, padded to a power of two of at least 16 for the matrix units, and what registers hold beside."""
    padded = max(16, triton.next_power_of_2(rows))
    stages = 2 if dtype == torch.float32 else 4 if padded <= 32 else 3
    return {"ROWS": padded, "TOKENS": 64, "BLOCK": 128 // dtype.itemsize, "num_stages": stages}


def backward_tile(rows: int, dtype: torch.dtype) -> dict[str, int]:
    padded = logits_tile(rows, dtype)["ROWS"]
    if torch.version.hip:
        return {"ROWS": padded, "TOKENS": 16, "BLOCK": 32 if padded <= 64 else 16, "num_stages": 2}
    if padded * dtype.itemsize > 128:
        return {"ROWS": padded, "TOKENS": 16, "BLOCK": 64, "num_stages": 2}
    return {"ROWS": padded, "TOKENS": 32, "BLOCK": 256 // dtype.itemsize if padded == 32 else 64, "num_stages": 3}


def precision(x: Tensor, narrow: str) -> str:
    """How the matrix units multiply: in float32 where there is no TF32, in the interpreter and on an AMD GPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "ieee"
    wide = "ieee" if torch.version.hip else "tf32x3"
    return wide if x.dtype == torch.float32 else narrow if narrow == "narrow" or wide != "ieee" else wide
