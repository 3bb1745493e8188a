# mypy: disable-error-code="no-untyped-def"
"""Their backwards for a GPU; see `darlit.ops.cpu` for the arguments and `triton_kernels` for the design."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.triton_forward import logit_tables
from darlit.ops.triton_rows import (
    addresses,
    aligned,
    bits,
    launch,
    load_rows,
    numbers,
    pointers,
    store_rows,
    token_stride,
)


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
def depth_read_backward_from_sources_kernel(
    table,  # the output's gradient, S * M sources
    logits,  # S times: address, token distance, target distance of [N, J] float32 logits
    lse,
    shares,
    answer,
    kind,
    sources,
    tokens,
    width,
    shares_row,
    M: tl.constexpr,
    J: tl.constexpr,
    VALUES: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same answer with ``<gradient, h_j> = sum_s weight_js <gradient, v^j_s>``."""
    dtype: tl.constexpr = kind.dtype.element_ty
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.arange(0, BLOCK)
    mask_TD = alive_T[:, None] & (column_D < width)[None, :]
    gradient_TD = load_rows(table, 0, token_T, column_D, mask_TD, dtype, ALIGNED)
    answer_T = answer + token_T * 3 * J
    for j in tl.static_range(J):
        lse_T = tl.load(lse + token_T * J + j, mask=alive_T, other=0.0)
        delta_T = tl.zeros([TOKENS], tl.float32)
        for s in range(sources):
            address = tl.load(logits + 3 * s).to(tl.pointer_type(tl.float32))
            offset_T = token_T.to(tl.int64) * tl.load(logits + 3 * s + 1) + j * tl.load(logits + 3 * s + 2)
            weight_T = tl.exp(tl.load(address + offset_T, mask=alive_T, other=0.0) - lse_T)
            value_TD = load_rows(table, 1 + s * M + ((VALUES >> j) & 1), token_T, column_D, mask_TD, dtype, ALIGNED)
            delta_T += weight_T * tl.sum(gradient_TD * value_TD, axis=1)
        share_T = tl.full([TOKENS], 1.0, tl.float32)
        if J > 1:
            share_T = tl.load(shares + token_T * shares_row + j, mask=alive_T, other=0.0)
        tl.store(answer_T + j, lse_T, mask=alive_T)
        tl.store(answer_T + J + j, share_T, mask=alive_T)
        tl.store(answer_T + 2 * J + j, delta_T, mask=alive_T)


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


def depth_read_backward(
    gradient: Tensor,
    out: Tensor | None,
    spreads: Sequence[Tensor],
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    columns: Sequence[int],
    lse_NJ: Tensor,
    shares: Tensor,
    value_streams: Sequence[int],
    answer_N3J: Tensor,
) -> None:
    """See `darlit.ops.cpu.depth_read_backward`."""
    tensors = [gradient, *(sources if out is None else [out, *spreads])]
    common = (lse_NJ, shares, answer_N3J, gradient)
    sizes = (*gradient.shape, token_stride(shares))
    constants = {"J": lse_NJ.shape[1], "ALIGNED": aligned(tensors)}
    if out is not None:
        table = addresses(tensors, gradient)
        launch(depth_read_backward_kernel, gradient, table, *common, *sizes, **constants)
        return
    launch(
        depth_read_backward_from_sources_kernel,
        gradient,
        addresses(tensors, gradient),
        logit_tables(logits, columns),
        *common,
        len(logits),
        *sizes,
        M=len(sources) // len(logits),
        VALUES=bits(value_streams),
        **constants,
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
    answer_table = [
        number
        for column, gradient, scalars in answers
        for number in (column, gradient.data_ptr(), gradient.stride(0), scalars.data_ptr())
    ]
    launch(
        stream_write_backward_kernel,
        like,
        addresses(tensors, like),
        numbers(answer_table, like),
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
        token_stride(rho),
        token_stride(beta),
        M=streams,
        J=logits_NJR.shape[1],
        KEYS=bits(key_streams),
        VALUES=bits(value_streams),
        ARRIVED=bits([gradient is not None for gradient in arrived]),
        CARRIED=bool(carried),
        OUTPUT=output is not None,
        RHO=rho is not None,
        BETA=beta is not None,
        ALIGNED=aligned([*tensors, *(gradient for _, gradient, _ in answers)]),
    )
    for target, stream in enumerate(key_streams):
        queries_gradient[target] = _product(products_NJR[:, target], written[stream])


def _product(left_NR: Tensor, right_ND: Tensor) -> Tensor:
    """``left^T right`` in float32, on the matrix units in the narrow dtype where the streams are narrow."""
    if right_ND.is_cuda and right_ND.dtype != torch.float32:
        return torch.mm(left_NR.to(right_ND.dtype).T, right_ND, out_dtype=torch.float32)
    return left_NR.T @ right_ND.float()
