# mypy: disable-error-code="no-untyped-def"
"""The four kernels for a GPU, behind the interface that `fused` expects of a backend; see `cpu` for the arguments.

A program owns TOKENS whole rows, so every sum over the width stays in registers and each stream is read once. Sources
are reached through a table of addresses and looped over, so one compiled kernel serves a history of any length. All
arithmetic is float32. Query rows are small, shared by all programs and served by the L2 cache; the queries' own
gradient is a matrix product of the logits' gradients, left to the BLAS.

Shapes: N tokens, D width, S sources of a read, M streams, J targets, R reads that see a source, A of them answered.
``KEYS`` and ``VALUES`` hold per target, one bit each, the stream of its keys and of its values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 8192


def supports(device_type: str, dtype: torch.dtype) -> bool:
    """Whether tensors of this kind can be served here; on a CPU in Triton's interpreter only."""
    interpreted = device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (device_type == "cuda" or interpreted) and dtype in DTYPES


@triton.jit
def pointers(address, stride, token_T, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers ``[TOKENS]``; aligned ones may be loaded and stored 16 bytes at a time."""
    base = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        stride = stride // 16 * 16  # a hint on an argument would not survive inlining
    return base + token_T.to(tl.int64) * stride


@triton.jit
def row_of(table, entry, token_T, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers ``[TOKENS]`` to the rows of the tensor whose address and row distance are the table's ``entry``."""
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
    VALUES: tl.constexpr,
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
            value_TD = load_rows(table, s * M + ((VALUES >> j) & 1), token_T, column_D, mask_TD, dtype, ALIGNED)
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
def depth_read_backward_kernel(
    table,  # the output's gradient, the output, J - 1 spreads
    lse,
    shares,
    answer,
    kind,
    tokens,
    width,
    shares_row,
    J: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The answer ``[N, 3 J]``: log-sum-exp, shares, ``<gradient, h_j>``; ``h_0 = x - sum_j share_j spread_j``."""
    dtype: tl.constexpr = kind.dtype.element_ty
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.arange(0, BLOCK)
    mask_TD = alive_T[:, None] & (column_D < width)[None, :]
    gradient_TD = load_rows(table, 0, token_T, column_D, mask_TD, dtype, ALIGNED)
    first_T = tl.sum(gradient_TD * load_rows(table, 1, token_T, column_D, mask_TD, dtype, ALIGNED), axis=1)
    answer_T = answer + token_T * 3 * J
    delta_T = first_T
    for j in tl.static_range(J):
        tl.store(answer_T + j, tl.load(lse + token_T * J + j, mask=alive_T, other=0.0), mask=alive_T)
        share_T = tl.full([TOKENS], 1.0, tl.float32)
        if J > 1:
            share_T = tl.load(shares + token_T * shares_row + j, mask=alive_T, other=0.0)
        tl.store(answer_T + J + j, share_T, mask=alive_T)
        if j > 0:
            spread_TD = load_rows(table, 1 + j, token_T, column_D, mask_TD, dtype, ALIGNED)
            delta_T = tl.sum(gradient_TD * spread_TD, axis=1)
            first_T -= share_T * delta_T
    tl.store(answer_T + 2 * J, first_T, mask=alive_T)
    for j in tl.static_range(1, J):
        if J > 2:  # with two targets the one delta is still at hand
            spread_TD = load_rows(table, 1 + j, token_T, column_D, mask_TD, dtype, ALIGNED)
            delta_T = tl.sum(gradient_TD * spread_TD, axis=1)
        tl.store(answer_T + 2 * J + j, first_T + delta_T, mask=alive_T)


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


@triton.jit
def stream_write_backward_kernel(
    table,  # M written, M gradients of them, M carried, the output, M gradients of the carried, that of the output
    answers,  # A times: column, address and row distance of the gradient, address of the [N, 3 J] scalars
    logits,
    scale,
    rho,
    beta,
    queries,
    products,
    gates,
    kind,
    answered,
    tokens,
    width,
    reads,
    rho_row,
    beta_row,
    M: tl.constexpr,
    J: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ARRIVED: tl.constexpr,  # per stream, one bit: whether a gradient came from the next write
    CARRIED: tl.constexpr,
    OUTPUT: tl.constexpr,
    RHO: tl.constexpr,
    BETA: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of carried streams, output, gates ``[N, M + 1]`` and of the products <w, x> ``[N, J, R]``."""
    dtype: tl.constexpr = kind.dtype.element_ty
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.arange(0, BLOCK)
    in_width_D = column_D < width
    mask_TD = alive_T[:, None] & in_width_D[None, :]

    x0_TD = load_rows(table, 0, token_T, column_D, mask_TD, dtype, ALIGNED)
    scale0_T = tl.load(scale + token_T * M, mask=alive_T, other=0.0)
    dx0_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    dx1_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    through0_T = tl.zeros([TOKENS], tl.float32)
    through1_T = tl.zeros([TOKENS], tl.float32)
    if ARRIVED & 1:
        dx0_TD = load_rows(table, M, token_T, column_D, mask_TD, dtype, ALIGNED)
    x1_TD = x0_TD
    scale1_T = scale0_T
    if M == 2:
        x1_TD = load_rows(table, 1, token_T, column_D, mask_TD, dtype, ALIGNED)
        scale1_T = tl.load(scale + token_T * M + 1, mask=alive_T, other=0.0)
        if ARRIVED & 2:
            dx1_TD = load_rows(table, M + 1, token_T, column_D, mask_TD, dtype, ALIGNED)

    for a in range(answered):
        column = tl.load(answers + 4 * a)
        address, stride = tl.load(answers + 4 * a + 1), tl.load(answers + 4 * a + 2)
        pointer_T = pointers(address, stride, token_T, dtype, ALIGNED)
        g_TD = tl.load(pointer_T[:, None] + column_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)
        scalars_T = tl.load(answers + 4 * a + 3).to(tl.pointer_type(tl.float32)) + token_T * 3 * J
        dot0_T = tl.sum(g_TD * x0_TD, axis=1)
        dot1_T = dot0_T
        if M == 2:
            dot1_T = tl.sum(g_TD * x1_TD, axis=1)
        for j in tl.static_range(J):
            logit_T = tl.load(logits + (token_T * J + j) * reads + column, mask=alive_T, other=0.0)
            weight_T = tl.load(scalars_T + J + j, mask=alive_T, other=0.0)
            weight_T *= tl.exp(logit_T - tl.load(scalars_T + j, mask=alive_T, other=0.0))
            delta_T = tl.load(scalars_T + 2 * J + j, mask=alive_T, other=0.0)
            query_D = tl.load(queries + (j * reads + column) * width + column_D, mask=in_width_D, other=0.0)
            if ((VALUES >> j) & 1) == 0:
                dlogit_T = weight_T * (dot0_T - delta_T)
                dx0_TD += weight_T[:, None] * g_TD
            else:
                dlogit_T = weight_T * (dot1_T - delta_T)
                dx1_TD += weight_T[:, None] * g_TD
            if ((KEYS >> j) & 1) == 0:
                product_T = dlogit_T * scale0_T
                through0_T += dlogit_T * logit_T
                dx0_TD += product_T[:, None] * query_D[None, :]
            else:
                product_T = dlogit_T * scale1_T
                through1_T += dlogit_T * logit_T
                dx1_TD += product_T[:, None] * query_D[None, :]
            tl.store(products + (token_T * J + j) * reads + column, product_T, mask=alive_T)
    dx0_TD -= (through0_T * scale0_T * scale0_T / width)[:, None] * x0_TD
    if M == 2:
        dx1_TD -= (through1_T * scale1_T * scale1_T / width)[:, None] * x1_TD

    if OUTPUT:
        y_TD = load_rows(table, 3 * M, token_T, column_D, mask_TD, dtype, ALIGNED)
        tl.store(gates + token_T * (M + 1), tl.sum(dx0_TD * y_TD, axis=1), mask=alive_T)
        dy_TD = dx0_TD
        if BETA:
            dy_TD = tl.load(beta + token_T * beta_row, mask=alive_T, other=0.0)[:, None] * dx0_TD
        if M == 2:
            tl.store(gates + token_T * (M + 1) + 1, tl.sum(dx1_TD * y_TD, axis=1), mask=alive_T)
            dy_TD += tl.load(beta + token_T * beta_row + 1, mask=alive_T, other=0.0)[:, None] * dx1_TD
        store_rows(table, 4 * M + 1, token_T, column_D, mask_TD, dy_TD, dtype, ALIGNED)
        drho_T = tl.zeros([TOKENS], tl.float32)
        if RHO:
            spread_TD = load_rows(table, 2 * M, token_T, column_D, mask_TD, dtype, ALIGNED) - load_rows(
                table, 2 * M + 1, token_T, column_D, mask_TD, dtype, ALIGNED
            )
            drho_T = tl.sum((dx0_TD - dx1_TD) * spread_TD, axis=1)
        tl.store(gates + token_T * (M + 1) + M, drho_T, mask=alive_T)
    if CARRIED:
        if RHO:
            step_T = 1 - tl.load(rho + token_T * rho_row, mask=alive_T, other=1.0)
            exchanged_TD = step_T[:, None] * (dx1_TD - dx0_TD)
            dx0_TD += exchanged_TD
            dx1_TD -= exchanged_TD
        store_rows(table, 3 * M + 1, token_T, column_D, mask_TD, dx0_TD, dtype, ALIGNED)
        if M == 2:
            store_rows(table, 3 * M + 2, token_T, column_D, mask_TD, dx1_TD, dtype, ALIGNED)


def tile(width: int) -> tuple[int, int, int]:
    """TOKENS and BLOCK of a program, and its warps: about two thousand elements of a stream, at least one row."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(4, 2048 // block))
    return rows, block, max(1, min(16, rows * block // 256))


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
    strides = [
        number
        for table, column in zip(logits, columns, strict=True)
        for number in (table.data_ptr() + 4 * column, table.stride(0), table.stride(1))
    ]
    _launch(
        depth_read_kernel,
        out,
        _table(tensors, out),
        _numbers(strides, out),
        shares,
        lse_NJ,
        out,
        len(logits),
        *out.shape,
        _token_stride(shares),
        M=len(sources) // len(logits),
        J=len(value_streams),
        VALUES=_bits(value_streams),
        SPREADS=bool(spreads),
        ALIGNED=_aligned(tensors),
    )


def depth_read_backward(
    gradient: Tensor, out: Tensor, spreads: Sequence[Tensor], lse_NJ: Tensor, shares: Tensor, answer_N3J: Tensor
) -> None:
    """See `darlit.ops.cpu.depth_read_backward`."""
    tensors = [gradient, out, *spreads]
    _launch(
        depth_read_backward_kernel,
        out,
        _table(tensors, out),
        lse_NJ,
        shares,
        answer_N3J,
        out,
        *out.shape,
        _token_stride(shares),
        J=lse_NJ.shape[1],
        ALIGNED=_aligned(tensors),
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
    _launch(
        stream_write_kernel,
        like,
        _table(tensors, like),
        scale_NM if rho is None else rho,
        scale_NM if beta is None else beta,
        queries_JRD,
        logits_NJR,
        scale_NM,
        like,
        eps,
        *like.shape,
        logits_NJR.shape[2],
        _token_stride(rho),
        _token_stride(beta),
        M=streams,
        J=logits_NJR.shape[1],
        KEYS=_bits(key_streams),
        CARRIED=bool(carried),
        OUTPUT=output is not None,
        RHO=rho is not None,
        BETA=beta is not None,
        ALIGNED=_aligned(tensors),
    )


def stream_write_backward(
    written: Sequence[Tensor],
    logits_NJR: Tensor,
    scale_NM: Tensor,
    written_gradients: Sequence[Tensor | None],
    answers: Sequence[tuple[int, Tensor, Tensor]],
    carried: Sequence[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries_JRD: Tensor,
    key_streams: Sequence[int],
    value_streams: Sequence[int],
    carried_gradients: Sequence[Tensor],
    output_gradient: Tensor | None,
    gates_gradient: Tensor | None,
    queries_gradient: Tensor,
) -> None:
    """See `darlit.ops.cpu.stream_write_backward`."""
    like, streams = written[0], scale_NM.shape[1]
    missing: list[Tensor | None] = [None] * streams
    arrived = list(written_gradients) or missing
    tensors = [
        *written,
        *arrived,
        *(carried or missing),
        output,
        *(carried_gradients or missing),
        output_gradient,
    ]
    products_NJR = torch.zeros_like(logits_NJR)
    numbers = [
        number
        for column, gradient, scalars in answers
        for number in (column, gradient.data_ptr(), gradient.stride(0), scalars.data_ptr())
    ]
    _launch(
        stream_write_backward_kernel,
        like,
        _table(tensors, like),
        _numbers(numbers, like),
        logits_NJR,
        scale_NM,
        scale_NM if rho is None else rho,
        scale_NM if beta is None else beta,
        queries_JRD,
        products_NJR,
        scale_NM if gates_gradient is None else gates_gradient,
        like,
        len(answers),
        *like.shape,
        logits_NJR.shape[2],
        _token_stride(rho),
        _token_stride(beta),
        M=streams,
        J=logits_NJR.shape[1],
        KEYS=_bits(key_streams),
        VALUES=_bits(value_streams),
        ARRIVED=_bits([gradient is not None for gradient in arrived]),
        CARRIED=bool(carried),
        OUTPUT=output is not None,
        RHO=rho is not None,
        BETA=beta is not None,
        ALIGNED=_aligned([*tensors, *(gradient for _, gradient, _ in answers)]),
    )
    for target, stream in enumerate(key_streams):
        queries_gradient[target] = _product(products_NJR[:, target], written[stream])


def _product(left_NR: Tensor, right_ND: Tensor) -> Tensor:
    """``left^T right`` in float32, on the matrix units in the narrow dtype where the streams are narrow."""
    if right_ND.is_cuda and right_ND.dtype != torch.float32:
        return torch.mm(left_NR.to(right_ND.dtype).T, right_ND, out_dtype=torch.float32)
    return left_NR.T @ right_ND.float()


def _launch(kernel: Any, like: Tensor, *arguments: object, **constants: object) -> None:
    tokens, width = like.shape
    if width > MAX_WIDTH:
        raise ValueError(f"width={width}: the Triton kernels take up to {MAX_WIDTH}; choose implementation='reference'")
    rows, block, warps = tile(width)
    kernel[(triton.cdiv(tokens, rows),)](*arguments, **constants, TOKENS=rows, BLOCK=block, num_warps=warps)


def _table(tensors: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Address and distance between rows of each; zeros for one that does not exist."""
    return _numbers([n for x in tensors for n in ((0, 0) if x is None else (x.data_ptr(), x.stride(0)))], like)


def _numbers(values: Sequence[int], like: Tensor) -> Tensor:
    """int64 on the device of ``like``, copied without waiting for it."""
    return torch.tensor(values or [0], dtype=torch.int64, pin_memory=like.is_cuda).to(like.device, non_blocking=True)


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Whether every row starts on 16 bytes at a distance of 16 elements, so that loads may be wide."""
    return all(x is None or (x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0) for x in tensors)


def _bits(values: Sequence[int]) -> int:
    return sum(int(value) << place for place, value in enumerate(values))


def _token_stride(gate: Tensor | None) -> int:
    return 0 if gate is None or gate.dim() == 1 else gate.stride(0)
