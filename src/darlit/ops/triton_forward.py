# mypy: disable-error-code="no-untyped-def"
"""Depth read and stream write for a GPU; see `darlit.ops.cpu` for the arguments and `triton_kernels` for the design."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.triton_rows import addresses, aligned, bits, launch, load_rows, numbers, store_rows, token_stride


@triton.jit
def depth_read_kernel(
    table,  # S * M sources, then the output, then J - 1 spreads
    logits,  # S times: address, token distance, target distance of [N, J] float32 logits
    shares,
    lse,
    kind,  # one element of the streams' dtype
    sources,
    tokens,
    width,
    shares_row,
    M: tl.constexpr,
    J: tl.constexpr,
    VALUES: tl.constexpr,  # a byte for each target: merged reads have a stream for each
    SPREADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``x = sum_j share_j h_j`` with an online softmax; the spreads ``h_j - h_0`` on the way."""
    dtype: tl.constexpr = kind.dtype.element_ty
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
        for s in range(sources):
            address = tl.load(logits + 3 * s).to(tl.pointer_type(tl.float32))
            offset_T = token_T.to(tl.int64) * tl.load(logits + 3 * s + 1) + j * tl.load(logits + 3 * s + 2)
            logit_T = tl.load(address + offset_T, mask=alive_T, other=0.0)
            value_TD = load_rows(table, s * M + ((VALUES >> 8 * j) & 255), token_T, column_D, mask_TD, dtype, ALIGNED)
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
                spread_TD = mixed_TD - first_TD
                store_rows(table, sources * M + j, token_T, column_D, mask_TD, spread_TD, dtype, ALIGNED)
    store_rows(table, sources * M, token_T, column_D, mask_TD, out_TD, dtype, ALIGNED)


@triton.jit
def stream_write_kernel(
    table,  # M carried streams, the output, M written streams
    rho,
    beta,
    queries,
    logits,
    scale,
    kind,
    eps,
    tokens,
    width,
    reads,
    rho_row,
    beta_row,
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
    dtype: tl.constexpr = kind.dtype.element_ty
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.arange(0, BLOCK)
    mask_TD = alive_T[:, None] & (column_D < width)[None, :]
    x0_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    x1_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    if CARRIED:
        x0_TD = load_rows(table, 0, token_T, column_D, mask_TD, dtype, ALIGNED)
        if M == 2:
            x1_TD = load_rows(table, 1, token_T, column_D, mask_TD, dtype, ALIGNED)
        if RHO:
            step_T = 1 - tl.load(rho + token_T * rho_row, mask=alive_T, other=1.0)
            exchanged_TD = step_T[:, None] * (x1_TD - x0_TD)
            x0_TD += exchanged_TD
            x1_TD -= exchanged_TD
    if OUTPUT:
        added_TD = load_rows(table, M, token_T, column_D, mask_TD, dtype, ALIGNED)
    for m in tl.static_range(M):
        x_TD = x0_TD if m == 0 else x1_TD
        if OUTPUT:
            if BETA:
                x_TD += tl.load(beta + token_T * beta_row + m, mask=alive_T, other=0.0)[:, None] * added_TD
            else:
                x_TD += added_TD
            store_rows(table, M + 1 + m, token_T, column_D, mask_TD, x_TD, dtype, ALIGNED)
            x_TD = x_TD.to(dtype).to(tl.float32)
        scale_T = tl.rsqrt(tl.sum(x_TD * x_TD, axis=1) / width + eps)
        tl.store(scale + token_T * M + m, scale_T, mask=alive_T)
        for j in tl.static_range(J):
            if ((KEYS >> j) & 1) == m:
                for r in range(reads):
                    query_D = tl.load(queries + (j * reads + r) * width + column_D, mask=column_D < width, other=0.0)
                    logit_T = tl.sum(x_TD * query_D[None, :], axis=1) * scale_T
                    tl.store(logits + (token_T * J + j) * reads + r, logit_T, mask=alive_T)


def depth_read(
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    columns: Sequence[int],
    shares: Tensor,
    value_streams: Sequence[int],
    out: Tensor,
    spreads: Sequence[Tensor],
    lse_NJ: Tensor,
) -> None:
    """See `darlit.ops.cpu.depth_read`."""
    tensors = [*sources, out, *spreads]
    launch(
        depth_read_kernel,
        out,
        addresses(tensors, out),
        logit_tables(logits, columns),
        shares,
        lse_NJ,
        out,
        len(logits),
        *out.shape,
        token_stride(shares),
        M=len(sources) // len(logits),
        J=len(value_streams),
        VALUES=bits(value_streams, each=8),
        SPREADS=bool(spreads),
        ALIGNED=aligned(tensors),
    )


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
        addresses(tensors, like),
        scale_NM if rho is None else rho,
        scale_NM if beta is None else beta,
        queries_JRD,
        logits_NJR,
        scale_NM,
        like,
        eps,
        *like.shape,
        logits_NJR.shape[2],
        token_stride(rho),
        token_stride(beta),
        M=streams,
        J=logits_NJR.shape[1],
        KEYS=bits(key_streams),
        CARRIED=bool(carried),
        OUTPUT=output is not None,
        RHO=rho is not None,
        BETA=beta is not None,
        ALIGNED=aligned(tensors),
    )


def logit_tables(logits: Sequence[Tensor], columns: Sequence[int]) -> Tensor:
    """Per source: the address of the read's column, the distance of tokens and that of targets."""
    return numbers(
        [
            number
            for table, column in zip(logits, columns, strict=True)
            for number in (table.data_ptr() + 4 * column, table.stride(0), table.stride(1))
        ],
        logits[0],
    )
