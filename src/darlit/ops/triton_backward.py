# mypy: disable-error-code="no-untyped-def"
"""Their backwards for a GPU; see `darlit.ops.cpu` for the arguments and `triton_kernels` for the design."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.triton_rows import aligned, bits, by_address, launch, load_rows, pointers, store_rows, token_stride
from darlit.ops.triton_tables import IncomingAddresses

VARYING = [
    "read", "strides", "incoming", "first", "first_read", "tokens", "reads", "shares_row", "rho_row",
    "beta_row", "queries_row",
]  # fmt: skip
ANYWHERE = ["tensors", "sources", "lse", "shares", "scalars", "logits", "scale", "rho", "beta", "products", "gates"]


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def depth_read_backward_kernel(
    tensors,  # the output's gradient, the output, J - 1 spreads
    strides,
    lse,
    shares,
    scalars,
    tokens,
    width,
    shares_row,
    J: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The answer ``[N, 3 J]``: log-sum-exp, shares, ``<gradient, h_j>``; ``h_0 = x - sum_j share_j spread_j``."""
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.arange(0, BLOCK)
    mask_TD = alive_T[:, None] & (column_D < width)[None, :]
    gradient_TD = load_rows(tensors[0], strides[0], token_T, column_D, mask_TD, ALIGNED)
    first_T = tl.sum(gradient_TD * load_rows(tensors[1], strides[1], token_T, column_D, mask_TD, ALIGNED), axis=1)
    scalars_T = scalars + token_T * 3 * J
    delta_T = first_T
    for j in tl.static_range(J):
        tl.store(scalars_T + j, tl.load(lse + token_T * J + j, mask=alive_T, other=0.0), mask=alive_T)
        share_T = tl.full([TOKENS], 1.0, tl.float32)
        if J > 1:
            share_T = tl.load(shares + token_T * shares_row + j, mask=alive_T, other=0.0)
        tl.store(scalars_T + J + j, share_T, mask=alive_T)
        if j > 0:
            spread_TD = load_rows(tensors[1 + j], strides[1 + j], token_T, column_D, mask_TD, ALIGNED)
            delta_T = tl.sum(gradient_TD * spread_TD, axis=1)
            first_T -= share_T * delta_T
    tl.store(scalars_T + 2 * J, first_T, mask=alive_T)
    for j in tl.static_range(1, J):
        if J > 2:  # with two targets the one delta is still at hand
            spread_TD = load_rows(tensors[1 + j], strides[1 + j], token_T, column_D, mask_TD, ALIGNED)
            delta_T = tl.sum(gradient_TD * spread_TD, axis=1)
        tl.store(scalars_T + 2 * J + j, first_T + delta_T, mask=alive_T)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def depth_read_backward_from_sources_kernel(
    tensors,  # the output's gradient, then of every source M streams
    sources,  # of every source the logits
    strides,  # of the tensors; of every logits the distances of tokens and of targets, and minus the first read
    lse,
    shares,
    scalars,
    read,
    tokens,
    width,
    shares_row,
    S: tl.constexpr,
    M: tl.constexpr,
    J: tl.constexpr,
    VALUES: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same scalars with ``<gradient, h_j> = sum_s weight_js <gradient, v^j_s>``; a few sources."""
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.arange(0, BLOCK)
    mask_TD = alive_T[:, None] & (column_D < width)[None, :]
    gradient_TD = load_rows(tensors[0], strides[0], token_T, column_D, mask_TD, ALIGNED)
    scalars_T = scalars + token_T * 3 * J
    for j in tl.static_range(J):
        lse_T = tl.load(lse + token_T * J + j, mask=alive_T, other=0.0)
        delta_T = tl.zeros([TOKENS], tl.float32)
        for s in tl.static_range(S):
            logit_T = sources[s] + token_T.to(tl.int64) * strides[1 + S * M + 3 * s]
            logit_T += j * strides[2 + S * M + 3 * s] + read + strides[3 + S * M + 3 * s]
            weight_T = tl.exp(tl.load(logit_T, mask=alive_T, other=0.0) - lse_T)
            value_TD = load_rows(
                tensors[1 + s * M + ((VALUES >> j) & 1)],
                strides[1 + s * M + ((VALUES >> j) & 1)],
                token_T,
                column_D,
                mask_TD,
                ALIGNED,
            )
            delta_T += weight_T * tl.sum(gradient_TD * value_TD, axis=1)
        share_T = tl.full([TOKENS], 1.0, tl.float32)
        if J > 1:
            share_T = tl.load(shares + token_T * shares_row + j, mask=alive_T, other=0.0)
        tl.store(scalars_T + j, lse_T, mask=alive_T)
        tl.store(scalars_T + J + j, share_T, mask=alive_T)
        tl.store(scalars_T + 2 * J + j, delta_T, mask=alive_T)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def stream_write_backward_kernel(
    tensors,  # M written, M gradients of them, M carried, the output, M gradients of the carried, that of the output
    strides,
    table,  # of records, see `triton_tables`
    logits,
    scale,
    rho,
    beta,
    queries,
    products,
    gates,
    incoming,
    first,
    first_read,
    tokens,
    width,
    reads,
    rho_row,
    beta_row,
    queries_row,
    M: tl.constexpr,
    J: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ARRIVED: tl.constexpr,  # per stream, one bit: whether a gradient came from the next write
    CARRIED: tl.constexpr,
    OUTPUT: tl.constexpr,
    RHO: tl.constexpr,
    BETA: tl.constexpr,
    ADD: tl.constexpr,  # products are zero and added to: some reads have no record, or two
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of carried streams, output, gates ``[N, M + 1]`` and of the products <w, x> ``[N, J, R]``."""
    dtype: tl.constexpr = tensors[0].dtype.element_ty
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive_T = token_T < tokens
    column_D = tl.arange(0, BLOCK)
    in_width_D = column_D < width
    mask_TD = alive_T[:, None] & in_width_D[None, :]

    x0_TD = load_rows(tensors[0], strides[0], token_T, column_D, mask_TD, ALIGNED)
    scale0_T = tl.load(scale + token_T * M, mask=alive_T, other=0.0)
    dx0_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    dx1_TD = tl.zeros([TOKENS, BLOCK], tl.float32)
    through0_T = tl.zeros([TOKENS], tl.float32)
    through1_T = tl.zeros([TOKENS], tl.float32)
    if ARRIVED & 1:
        dx0_TD = load_rows(tensors[M], strides[M], token_T, column_D, mask_TD, ALIGNED)
    x1_TD = x0_TD
    scale1_T = scale0_T
    if M == 2:
        x1_TD = load_rows(tensors[1], strides[1], token_T, column_D, mask_TD, ALIGNED)
        scale1_T = tl.load(scale + token_T * M + 1, mask=alive_T, other=0.0)
        if ARRIVED & 2:
            dx1_TD = load_rows(tensors[M + 1], strides[M + 1], token_T, column_D, mask_TD, ALIGNED)

    for a in range(incoming):
        record = table + 4 * (first + a)
        column = tl.load(record) - first_read
        address, stride = tl.load(record + 1), tl.load(record + 2)
        pointer_T = pointers(address, stride, token_T, dtype, ALIGNED)
        g_TD = tl.load(pointer_T[:, None] + column_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)
        scalars_T = tl.load(record + 3).to(tl.pointer_type(tl.float32)) + token_T * 3 * J
        dot0_T = tl.sum(g_TD * x0_TD, axis=1)
        dot1_T = dot0_T
        if M == 2:
            dot1_T = tl.sum(g_TD * x1_TD, axis=1)
        for j in tl.static_range(J):
            logit_T = tl.load(logits + (token_T * J + j) * reads + column, mask=alive_T, other=0.0)
            weight_T = tl.load(scalars_T + J + j, mask=alive_T, other=0.0)
            weight_T *= tl.exp(logit_T - tl.load(scalars_T + j, mask=alive_T, other=0.0))
            delta_T = tl.load(scalars_T + 2 * J + j, mask=alive_T, other=0.0)
            query_D = tl.load(queries + j * queries_row + column * width + column_D, mask=in_width_D, other=0.0)
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
            product = products + (token_T * J + j) * reads + column
            if ADD:
                product_T += tl.load(product, mask=alive_T, other=0.0)
            tl.store(product, product_T, mask=alive_T)
    dx0_TD -= (through0_T * scale0_T * scale0_T / width)[:, None] * x0_TD
    if M == 2:
        dx1_TD -= (through1_T * scale1_T * scale1_T / width)[:, None] * x1_TD

    if OUTPUT:
        beta0_T = tl.full([TOKENS], 1.0, tl.float32)
        beta1_T = beta0_T
        if BETA:
            beta0_T = tl.load(beta + token_T * beta_row, mask=alive_T, other=0.0)
            if M == 2:
                beta1_T = tl.load(beta + token_T * beta_row + 1, mask=alive_T, other=0.0)
        dy_TD = beta0_T[:, None] * dx0_TD
        if CARRIED:
            y_TD = load_rows(tensors[3 * M], strides[3 * M], token_T, column_D, mask_TD, ALIGNED)
            tl.store(gates + token_T * (M + 1), tl.sum(dx0_TD * y_TD, axis=1), mask=alive_T)
        else:  # what was written is beta times the output
            gate_T = tl.sum(dx0_TD * x0_TD, axis=1) / tl.where(beta0_T == 0, 1.0, beta0_T)
            tl.store(gates + token_T * (M + 1), tl.where(beta0_T == 0, 0.0, gate_T), mask=alive_T)
        if M == 2:
            dy_TD += beta1_T[:, None] * dx1_TD
            if CARRIED:
                tl.store(gates + token_T * (M + 1) + 1, tl.sum(dx1_TD * y_TD, axis=1), mask=alive_T)
            else:
                gate_T = tl.sum(dx1_TD * x1_TD, axis=1) / tl.where(beta1_T == 0, 1.0, beta1_T)
                tl.store(gates + token_T * (M + 1) + 1, tl.where(beta1_T == 0, 0.0, gate_T), mask=alive_T)
        store_rows(tensors[4 * M + 1], strides[4 * M + 1], token_T, column_D, mask_TD, dy_TD, ALIGNED)
        drho_T = tl.zeros([TOKENS], tl.float32)
        if RHO:
            spread_TD = load_rows(tensors[2 * M], strides[2 * M], token_T, column_D, mask_TD, ALIGNED) - load_rows(
                tensors[2 * M + 1], strides[2 * M + 1], token_T, column_D, mask_TD, ALIGNED
            )
            drho_T = tl.sum((dx0_TD - dx1_TD) * spread_TD, axis=1)
        tl.store(gates + token_T * (M + 1) + M, drho_T, mask=alive_T)
    if CARRIED:
        if RHO:
            step_T = 1 - tl.load(rho + token_T * rho_row, mask=alive_T, other=1.0)
            exchanged_TD = step_T[:, None] * (dx1_TD - dx0_TD)
            dx0_TD += exchanged_TD
            dx1_TD -= exchanged_TD
        store_rows(tensors[3 * M + 1], strides[3 * M + 1], token_T, column_D, mask_TD, dx0_TD, ALIGNED)
        if M == 2:
            store_rows(tensors[3 * M + 2], strides[3 * M + 2], token_T, column_D, mask_TD, dx1_TD, ALIGNED)


def depth_read_backward(
    gradient: Tensor,
    out: Tensor | None,
    spreads: Sequence[Tensor],
    sources: Sequence[Any],
    read: int,
    lse_NJ: Tensor,
    shares: Tensor,
    value_streams: Sequence[int],
    scalars_N3J: Tensor,
) -> None:
    """See `darlit.ops.cpu.depth_read_backward`."""
    width = gradient.shape[-1]
    common, sizes = (lse_NJ, shares, scalars_N3J), (gradient.numel() // width, width, token_stride(shares))
    if out is not None:
        tensors = [gradient, out, *spreads]
        launch(
            depth_read_backward_kernel, gradient, *by_address(tensors, gradient), *common, *sizes,
            J=lse_NJ.shape[1], ALIGNED=aligned(tensors),
        )  # fmt: skip
        return
    tensors = [gradient, *(x for source in sources for x in source.rows)]
    rows, strides = by_address(tensors, gradient)
    for source in sources:
        strides += (source.logits.stride(0), source.logits.stride(1), -source.first_read)
    launch(
        depth_read_backward_from_sources_kernel, gradient, rows, tuple(source.logits for source in sources), strides,
        *common, read, *sizes, S=len(sources), M=len(sources[0].rows), J=lse_NJ.shape[1], VALUES=bits(value_streams),
        ALIGNED=aligned(tensors),
    )  # fmt: skip


def stream_write_backward(
    written: Sequence[Tensor],
    logits_NJR: Tensor,
    scale_NM: Tensor,
    arrived: Sequence[Tensor | None],
    incoming: tuple[IncomingAddresses, int, int],
    first_read: int,
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
    queries_gradient: Tensor | None,
) -> None:
    """See `darlit.ops.cpu.stream_write_backward`."""
    like, streams, (addresses, first, count) = written[0], scale_NM.shape[1], incoming
    width = like.shape[-1]
    missing: list[Tensor | None] = [None] * streams
    gradients = list(arrived) or missing
    tensors = [
        *written, *gradients, *(carried or missing), output, *(carried_gradients or missing), output_gradient,
    ]  # fmt: skip
    reads = logits_NJR.shape[2]
    every_read_once = count == reads and len(set(addresses.reads[first : first + count])) == reads
    products_NJR = torch.empty_like(logits_NJR) if every_read_once else torch.zeros_like(logits_NJR)
    launch(
        stream_write_backward_kernel,
        like,
        *by_address(tensors, like),
        addresses.table,
        logits_NJR,
        scale_NM,
        scale_NM if rho is None else rho,
        scale_NM if beta is None else beta,
        queries_JRD,
        products_NJR,
        scale_NM if gates_gradient is None else gates_gradient,
        count,
        first,
        first_read,
        like.numel() // width,
        width,
        reads,
        token_stride(rho),
        token_stride(beta),
        queries_JRD.stride(0),
        M=streams,
        J=logits_NJR.shape[1],
        KEYS=bits(key_streams),
        VALUES=bits(value_streams),
        ARRIVED=bits([gradient is not None for gradient in gradients]),
        CARRIED=bool(carried),
        OUTPUT=output_gradient is not None,
        RHO=rho is not None,
        BETA=beta is not None,
        ADD=not every_read_once,
        ALIGNED=addresses.aligned and aligned(tensors),
    )
    if queries_gradient is not None and count:
        for target, stream in enumerate(key_streams):
            queries_gradient[target] += _product(products_NJR[:, target], written[stream].reshape(-1, width))


def _product(left_NR: Tensor, right_ND: Tensor) -> Tensor:
    """``left^T right`` in float32, on the matrix units in the narrow dtype where the streams are narrow."""
    if right_ND.is_cuda and right_ND.dtype != torch.float32:
        return torch.mm(left_NR.to(right_ND.dtype).T, right_ND, out_dtype=torch.float32)
    return left_NR.T @ right_ND.float()
