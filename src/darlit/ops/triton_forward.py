# mypy: disable-error-code="no-untyped-def"
"""Depth read and stream write for a GPU; see `darlit.ops.cpu` for the arguments and `triton_kernels` for the design."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.triton_rows import aligned, bits, by_address, launch, load_rows, pointers, store_rows, token_stride
from darlit.ops.triton_tables import SourceAddresses

VARYING = ["count", "read", "tokens", "shares_row", "reads", "rho_row", "beta_row", "strides", "queries_row"]
ANYWHERE = ["tensors", "partial", "shares", "rho", "beta", "logits", "lse", "scale"]


@triton.jit
def int64(number):
    """Also of a 1, which the compiler takes as a constant."""
    return number + tl.zeros([], tl.int64)


@triton.jit
def source_row(
    table, slot, count, partial, strides, j: tl.constexpr, VALUES: tl.constexpr, MERGED: tl.constexpr,
    STREAMS: tl.constexpr,
):  # fmt: skip
    """Address and row distance of target j's values in source ``slot``; the one after the table is the partial."""
    value: tl.constexpr = (VALUES >> 8 * j) & 255
    stream: tl.constexpr = j if MERGED else value
    row = table + slot * (2 * STREAMS + 3) + 2 * stream
    in_table = slot < count
    address = tl.where(in_table, tl.load(row, mask=in_table, other=0), partial[value].to(tl.int64))
    return address, tl.where(in_table, tl.load(row + 1, mask=in_table, other=0), int64(strides[value]))


@triton.jit
def source_logits(table, slot, count, read, token, target, partial, strides, M: tl.constexpr, STREAMS: tl.constexpr):
    """Pointers to the logits of source ``slot``."""
    row = table + slot * (2 * STREAMS + 3) + 2 * STREAMS
    in_table = slot < count
    last = partial[M].to(tl.int64) + 4 * int64(strides[M + 2])
    address = tl.where(in_table, tl.load(row, mask=in_table, other=0), last)
    token_stride = tl.where(in_table, tl.load(row + 1, mask=in_table, other=0), int64(strides[M]))
    target_stride = tl.where(in_table, tl.load(row + 2, mask=in_table, other=0), int64(strides[M + 1]))
    return address.to(tl.pointer_type(tl.float32)) + token * token_stride + target * target_stride + read


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def depth_read_kernel(
    table,  # of the completed sources, see `triton_tables`
    partial,  # M streams and the logits of one more source
    tensors,  # the output, then J - 1 spreads
    strides,  # of the partial's streams, its logits' tokens and targets, minus its first read; then of the tensors
    shares,
    lse,
    count,
    read,
    tokens,
    width,
    shares_row,
    M: tl.constexpr,
    J: tl.constexpr,
    VALUES: tl.constexpr,  # a byte for each target
    PARTIAL: tl.constexpr,
    MERGED: tl.constexpr,  # the table holds mixes, with a stream for each target
    SPREADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``x = sum_j share_j h_j`` with an online softmax; the spreads ``h_j - h_0`` on the way."""
    dtype: tl.constexpr = tensors[0].dtype.element_ty
    STREAMS: tl.constexpr = J if MERGED else M
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.arange(0, BLOCK)
    mask_TD = alive_T[:, None] & (column_D < width)[None, :]
    out_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    first_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    for j in tl.static_range(J):
        top_T = tl.full([TOKENS], float("-inf"), tl.float32)
        total_T = tl.zeros([TOKENS], tl.float32)
        mixed_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
        for s in range(count + PARTIAL):
            at_T = source_logits(table, s, count, read, token_T.to(tl.int64), j, partial, strides, M, STREAMS)
            logit_T = tl.load(at_T, mask=alive_T, other=0.0)
            address, stride = source_row(table, s, count, partial, strides, j, VALUES, MERGED, STREAMS)
            row_T = pointers(address, stride, token_T, dtype, ALIGNED)
            value_TD = tl.load(row_T[:, None] + column_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)
            new_top_T = tl.maximum(top_T, logit_T)
            keep_T = tl.exp(top_T - new_top_T)
            weight_T = tl.exp(logit_T - new_top_T)
            total_T = total_T * keep_T + weight_T
            mixed_TD = mixed_TD * keep_T[:, None] + weight_T[:, None] * value_TD
            top_T = new_top_T
        mixed_TD = mixed_TD / total_T[:, None]
        tl.store(lse + token_T * J + j, top_T + tl.log(total_T), mask=alive_T)
        if J == 1:
            out_TD = mixed_TD
        else:
            share_T = tl.load(shares + token_T * shares_row + j, mask=alive_T, other=0.0)
            out_TD += share_T[:, None] * mixed_TD
            if j == 0:
                first_TD = mixed_TD
            elif SPREADS:
                store_rows(tensors[j], strides[M + 3 + j], token_T, column_D, mask_TD, mixed_TD - first_TD, ALIGNED)
    store_rows(tensors[0], strides[M + 3], token_T, column_D, mask_TD, out_TD, ALIGNED)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def stream_write_kernel(
    tensors,  # M carried streams, the output, M written streams
    strides,
    rho,
    beta,
    queries,
    logits,
    scale,
    eps,
    tokens,
    width,
    reads,
    rho_row,
    beta_row,
    queries_row,
    M: tl.constexpr,
    J: tl.constexpr,
    KEYS: tl.constexpr,
    CARRIED: tl.constexpr,
    OUTPUT: tl.constexpr,
    RHO: tl.constexpr,
    BETA: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The written streams, their key norms' scales ``[N, M]`` and logits ``[N, J, R]``."""
    dtype: tl.constexpr = tensors[0].dtype.element_ty
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.arange(0, BLOCK)
    mask_TD = alive_T[:, None] & (column_D < width)[None, :]
    x0_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    x1_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    if CARRIED:
        x0_TD = load_rows(tensors[0], strides[0], token_T, column_D, mask_TD, ALIGNED)
        if M == 2:
            x1_TD = load_rows(tensors[1], strides[1], token_T, column_D, mask_TD, ALIGNED)
        if RHO:
            step_T = 1 - tl.load(rho + token_T * rho_row, mask=alive_T, other=1.0)
            exchanged_TD = step_T[:, None] * (x1_TD - x0_TD)
            x0_TD += exchanged_TD
            x1_TD -= exchanged_TD
    if OUTPUT:
        added_TD = load_rows(tensors[M], strides[M], token_T, column_D, mask_TD, ALIGNED)
    for m in tl.static_range(M):
        x_TD = x0_TD if m == 0 else x1_TD
        if OUTPUT:
            if BETA:
                x_TD += tl.load(beta + token_T * beta_row + m, mask=alive_T, other=0.0)[:, None] * added_TD
            else:
                x_TD += added_TD
            store_rows(tensors[M + 1 + m], strides[M + 1 + m], token_T, column_D, mask_TD, x_TD, ALIGNED)
            x_TD = x_TD.to(dtype).to(tl.float32)
        scale_T = tl.rsqrt(tl.sum(x_TD * x_TD, axis=1) / width + eps)
        tl.store(scale + token_T * M + m, scale_T, mask=alive_T)
        for j in tl.static_range(J):
            if ((KEYS >> j) & 1) == m:
                for r in range(reads):
                    query_D = tl.load(
                        queries + j * queries_row + r * width + column_D, mask=column_D < width, other=0.0
                    )
                    logit_T = tl.sum(x_TD * query_D[None, :], axis=1) * scale_T
                    tl.store(logits + (token_T * J + j) * reads + r, logit_T, mask=alive_T)


def depth_read(
    addresses: SourceAddresses,
    count: int,
    merged: bool,
    partial: Any,
    read: int,
    streams: int,
    shares: Tensor,
    value_streams: Sequence[int],
    out: Tensor,
    spreads: Sequence[Tensor],
    lse_NJ: Tensor,
) -> None:
    """See `darlit.ops.cpu.depth_read`."""
    tensors, more, partial_strides = (out, *spreads), *partial_of(partial, streams, out)
    launch(
        depth_read_kernel,
        out,
        addresses.table,
        more,
        tensors,
        (*partial_strides, *(x.stride(-2) for x in tensors)),
        shares,
        lse_NJ,
        count,
        read,
        out.numel() // out.shape[-1],
        out.shape[-1],
        token_stride(shares),
        M=streams,
        J=len(value_streams),
        VALUES=bits(value_streams, each=8),
        PARTIAL=partial is not None,
        MERGED=merged,
        SPREADS=bool(spreads),
        ALIGNED=addresses.aligned and aligned([*tensors, *more[:streams]]),
    )


def partial_of(partial: Any, streams: int, like: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Streams and logits of one source, and their distances; ``like`` stands in for none."""
    if partial is None:
        return (like,) * (streams + 1), (like.stride(-2),) * streams + (0, 0, 0)
    logits = partial.logits
    distances = (logits.stride(0), logits.stride(1), -partial.first_read)
    return (*partial.rows, logits), (*(x.stride(-2) for x in partial.rows), *distances)


def stream_write(
    carried: Sequence[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries_JRD: Tensor,
    key_streams: Sequence[int],
    eps: float,
    written: Sequence[Tensor],
    logits_NJR: Tensor,
    scale_NM: Tensor,
) -> None:
    """See `darlit.ops.cpu.stream_write`."""
    like = carried[0] if output is None else output
    streams = scale_NM.shape[1]
    missing: list[Tensor | None] = [None] * streams
    tensors = [*(carried or missing), output, *(written or missing)]
    launch(
        stream_write_kernel,
        like,
        *by_address(tensors, like),
        scale_NM if rho is None else rho,
        scale_NM if beta is None else beta,
        queries_JRD,
        logits_NJR,
        scale_NM,
        eps,
        like.numel() // like.shape[-1],
        like.shape[-1],
        logits_NJR.shape[2],
        token_stride(rho),
        token_stride(beta),
        queries_JRD.stride(0),
        M=streams,
        J=logits_NJR.shape[1],
        KEYS=bits(key_streams),
        CARRIED=bool(carried),
        OUTPUT=output is not None,
        RHO=rho is not None,
        BETA=beta is not None,
        ALIGNED=aligned(tensors),
    )
