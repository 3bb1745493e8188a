# mypy: disable-error-code="no-untyped-def, assignment"
"""Coefficients of widened streams from their logits, for a GPU; see `darlit.ops.cpu` for the arguments.

A program is one warp and owns a few tokens, with the n x n matrix of each in registers. Sinkhorn's first iteration
takes the largest logits out before it exponentiates, so logits far apart stay finite; after it every column and every
row has an entry of at least 1 / n^2, and the others divide plainly. Nothing is kept for the backward pass except the
logits: it computes the matrices again, from the start of every `SEGMENT` of iterations, because registers do not hold
all of them.

Shapes: T tokens, streams written O and read S, both padded to a power of two. Entries of the padding are zero.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.reference import SINKHORN_ITERATIONS

WARPS = 1
SEGMENTS = 4
SEGMENT = SINKHORN_ITERATIONS // SEGMENTS
VARYING = ["tokens"]


@triton.jit
def divided(x_TOS, AXIS: tl.constexpr):
    """Divided by the sums over one axis; zeros stay zeros."""
    total = tl.sum(x_TOS, axis=AXIS, keep_dims=True)
    return x_TOS / tl.where(total == 0, 1.0, total)


@triton.jit
def iterated(x_TOS, count):
    for _ in range(count):
        x_TOS = divided(divided(x_TOS, 1), 2)
    return x_TOS


@triton.jit
def first_iteration(logit_TOS, valid_TOS):
    """Columns, then rows, of ``exp(logits)`` divided by their sums: the matrix after each of both."""
    low_TOS = tl.where(valid_TOS, logit_TOS, float("-inf"))
    top_T1S = tl.max(low_TOS, axis=1, keep_dims=True)
    shifted_TOS = tl.where(valid_TOS, logit_TOS - tl.where(top_T1S == float("-inf"), 0.0, top_T1S), float("-inf"))
    total_T1S = tl.sum(tl.exp(shifted_TOS), axis=1, keep_dims=True)
    total_T1S = tl.where(total_T1S == 0, 1.0, total_T1S)
    top_TO1 = tl.max(shifted_TOS, axis=2, keep_dims=True)
    row_TOS = tl.exp(shifted_TOS - tl.where(top_TO1 == float("-inf"), 0.0, top_TO1)) / total_T1S
    return tl.exp(shifted_TOS) / total_T1S, divided(row_TOS, 2)


@triton.jit
def matrix_of(logit_TOS, valid_TOS, sign_OS, N: tl.constexpr, ITERATIONS: tl.constexpr):
    """The doubly stochastic matrix of ``exp(logits)``."""
    if N == 2:
        half_T11 = tl.sum(tl.sum(logit_TOS * sign_OS, axis=2, keep_dims=True), axis=1, keep_dims=True) / 2
        return tl.sigmoid(half_T11 * sign_OS)
    _, matrix_TOS = first_iteration(logit_TOS, valid_TOS)
    return iterated(matrix_TOS, ITERATIONS - 1)


@triton.jit
def without_sums(gradient_TOS, matrix_TOS, AXIS: tl.constexpr):
    """Gradient through a division by sums, both gradients with respect to logarithms."""
    return gradient_TOS - matrix_TOS * tl.sum(gradient_TOS, axis=AXIS, keep_dims=True)


@triton.jit
def matrix_backward(
    gradient_TOS, logit_TOS, valid_TOS, sign_OS, N: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr
):
    """Gradient of the logits from that of the matrix."""
    if N == 2:
        matrix_TOS = matrix_of(logit_TOS, valid_TOS, sign_OS, N, 1)
        # Both entries of a row have the same derivative, stay times swap.
        slope_TOS = sign_OS * gradient_TOS * matrix_TOS * (1 - matrix_TOS)
        return sign_OS * tl.sum(tl.sum(slope_TOS, axis=2, keep_dims=True), axis=1, keep_dims=True) / 2
    column_TOS, matrix_TOS = first_iteration(logit_TOS, valid_TOS)
    starts = (matrix_TOS,)
    for _ in tl.static_range(SEGMENTS - 1):
        starts += (iterated(starts[-1], SEGMENT),)
    last_TOS = iterated(starts[SEGMENTS - 1], SEGMENT - 1)
    gradient_TOS = gradient_TOS * last_TOS
    for segment in tl.static_range(SEGMENTS):
        start_TOS = starts[SEGMENTS - 1 - segment]
        # The first iteration is not one of this loop, so the last segment has one fewer.
        for back in range(1 if segment == 0 else 0, SEGMENT):
            before_TOS = iterated(start_TOS, SEGMENT - 1 - back)
            divided_TOS = divided(before_TOS, 1)
            gradient_TOS = without_sums(gradient_TOS, divided(divided_TOS, 2), 2)
            gradient_TOS = without_sums(gradient_TOS, divided_TOS, 1)
    return without_sums(without_sums(gradient_TOS, matrix_TOS, 2), column_TOS, 1)


@triton.jit
def gate(logit, bias, scale, FACTOR: tl.constexpr, HC: tl.constexpr):
    if HC:
        return bias + scale * (2 * tl.sigmoid(2 * logit) - 1)
    return FACTOR * tl.sigmoid(scale * logit + bias)


@triton.jit
def gate_backward(gradient, logit, bias, scale, FACTOR: tl.constexpr, HC: tl.constexpr):
    """Gradients of logit, bias and scale."""
    if HC:
        part = 2 * tl.sigmoid(2 * logit) - 1
        return gradient * scale * (1 - part * part), gradient, gradient * part
    value = tl.sigmoid(scale * logit + bias)
    gradient = gradient * FACTOR * value * (1 - value)
    return gradient * scale, gradient, gradient * logit


@triton.jit
def places(tokens, N: tl.constexpr, C: tl.constexpr, HC: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr):
    """Where in the logits pre ``[T, S]``, post ``[T, S]`` and res ``[T, O, S]`` begin, and what of it exists."""
    token_T = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    stream_S = tl.arange(0, PADDED)
    in_TS = (token_T < tokens)[:, None] & (stream_S < N)[None, :]
    in_TOS = in_TS[:, None, :] & (stream_S < N)[None, :, None]
    if HC:
        pre_TS = (stream_S.to(tl.int64) * tokens)[None, :] * C + token_T[:, None] * C
        res_TOS = pre_TS[:, None, :] + 2 + stream_S[None, :, None]
        return token_T, stream_S, in_TS, in_TOS, pre_TS, pre_TS + 1, res_TOS
    pre_TS = token_T[:, None] * C + stream_S[None, :]
    res_TOS = (token_T * C + 2 * N)[:, None, None] + stream_S[None, :, None] * N + stream_S[None, None, :]
    return token_T, stream_S, in_TS, in_TOS, pre_TS, pre_TS + N, res_TOS


@triton.jit(do_not_specialize=VARYING)
def stream_gates_kernel(
    logits,
    parameters,
    pre,
    write,
    tokens,
    N: tl.constexpr,
    C: tl.constexpr,
    HC: tl.constexpr,
    RES: tl.constexpr,
    ITERATIONS: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
):
    token_T, stream_S, in_TS, in_TOS, pre_TS, post_TS, res_TOS = places(tokens, N, C, HC, TOKENS, PADDED)
    in_S, in_OS = stream_S < N, (stream_S < N)[:, None] & (stream_S < N)[None, :]
    place_OS = stream_S[:, None] * N + stream_S[None, :]
    scales = parameters + (2 * N + N * N if RES else 2 * N)
    pre_scale, post_scale = tl.load(scales), tl.load(scales + 1)

    bias_S = tl.load(parameters + stream_S, mask=in_S, other=0.0)
    value_TS = gate(tl.load(logits + pre_TS, mask=in_TS, other=0.0), bias_S[None, :], pre_scale, 1, HC)
    tl.store(pre + token_T[:, None] * N + stream_S[None, :], value_TS, mask=in_TS)
    bias_S = tl.load(parameters + N + stream_S, mask=in_S, other=0.0)
    value_TS = gate(tl.load(logits + post_TS, mask=in_TS, other=0.0), bias_S[None, :], post_scale, 2, HC)
    write_TO = write + (token_T * N)[:, None] * (N + 1) + stream_S[None, :] * (N + 1)
    tl.store(write_TO + N, value_TS, mask=in_TS)

    sign_OS = tl.where(stream_S[:, None] == stream_S[None, :], 1.0, -1.0)[None, :, :]
    if RES:
        logit_TOS = tl.load(logits + res_TOS, mask=in_TOS, other=0.0)
        bias_OS = tl.load(parameters + 2 * N + place_OS, mask=in_OS, other=0.0)[None, :, :]
        if HC:
            value_TOS = gate(logit_TOS, bias_OS, pre_scale, 1, HC)
        else:
            value_TOS = matrix_of(tl.load(scales + 2) * logit_TOS + bias_OS, in_OS[None, :, :], sign_OS, N, ITERATIONS)
    else:
        value_TOS = tl.broadcast_to((sign_OS + 1) / 2, [TOKENS, PADDED, PADDED])
    tl.store(write_TO[:, :, None] + stream_S[None, None, :], value_TOS, mask=in_TOS)


@triton.jit(do_not_specialize=VARYING)
def stream_gates_backward_kernel(
    pre_gradient,
    write_gradient,
    logits,
    parameters,
    logits_gradient,
    partial_gradients,  # of the parameters, one row a program
    tokens,
    N: tl.constexpr,
    C: tl.constexpr,
    HC: tl.constexpr,
    RES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
):
    token_T, stream_S, in_TS, in_TOS, pre_TS, post_TS, res_TOS = places(tokens, N, C, HC, TOKENS, PADDED)
    in_S, in_OS = stream_S < N, (stream_S < N)[:, None] & (stream_S < N)[None, :]
    place_OS = stream_S[:, None] * N + stream_S[None, :]
    biases: tl.constexpr = 2 * N + N * N if RES else 2 * N
    count: tl.constexpr = biases + (3 if RES and not HC else 2)
    scales = parameters + biases
    partial_gradients += tl.program_id(0) * count
    pre_scale, post_scale = tl.load(scales), tl.load(scales + 1)

    logit_TS = tl.load(logits + pre_TS, mask=in_TS, other=0.0)
    bias_S = tl.load(parameters + stream_S, mask=in_S, other=0.0)
    gradient_TS = tl.load(pre_gradient + token_T[:, None] * N + stream_S[None, :], mask=in_TS, other=0.0)
    dlogit_TS, dbias_TS, dpre_TS = gate_backward(gradient_TS, logit_TS, bias_S[None, :], pre_scale, 1, HC)
    tl.store(logits_gradient + pre_TS, dlogit_TS, mask=in_TS)
    tl.store(partial_gradients + stream_S, tl.sum(dbias_TS, axis=0), mask=in_S)
    pre_scale_gradient = tl.sum(dpre_TS)

    logit_TS = tl.load(logits + post_TS, mask=in_TS, other=0.0)
    bias_S = tl.load(parameters + N + stream_S, mask=in_S, other=0.0)
    write_TO = write_gradient + (token_T * N)[:, None] * (N + 1) + stream_S[None, :] * (N + 1)
    gradient_TS = tl.load(write_TO + N, mask=in_TS, other=0.0)
    dlogit_TS, dbias_TS, dpost_TS = gate_backward(gradient_TS, logit_TS, bias_S[None, :], post_scale, 2, HC)
    tl.store(logits_gradient + post_TS, dlogit_TS, mask=in_TS)
    tl.store(partial_gradients + N + stream_S, tl.sum(dbias_TS, axis=0), mask=in_S)
    tl.store(partial_gradients + biases + 1, tl.sum(dpost_TS))

    if RES:
        logit_TOS = tl.load(logits + res_TOS, mask=in_TOS, other=0.0)
        bias_OS = tl.load(parameters + 2 * N + place_OS, mask=in_OS, other=0.0)[None, :, :]
        gradient_TOS = tl.load(write_TO[:, :, None] + stream_S[None, None, :], mask=in_TOS, other=0.0)
        if HC:
            dlogit_TOS, dbias_TOS, part_TOS = gate_backward(gradient_TOS, logit_TOS, bias_OS, pre_scale, 1, HC)
            pre_scale_gradient += tl.sum(part_TOS)
        else:
            scale = tl.load(scales + 2)
            sign_OS = tl.where(stream_S[:, None] == stream_S[None, :], 1.0, -1.0)[None, :, :]
            score_TOS = scale * logit_TOS + bias_OS
            dbias_TOS = matrix_backward(gradient_TOS, score_TOS, in_OS[None, :, :], sign_OS, N, SEGMENTS, SEGMENT)
            dbias_TOS = tl.where(in_TOS, dbias_TOS, 0.0)
            dlogit_TOS = scale * dbias_TOS
            tl.store(partial_gradients + biases + 2, tl.sum(dbias_TOS * logit_TOS))
        tl.store(logits_gradient + res_TOS, dlogit_TOS, mask=in_TOS)
        tl.store(partial_gradients + 2 * N + place_OS, tl.sum(dbias_TOS, axis=0), mask=in_OS)
    tl.store(partial_gradients + biases, pre_scale_gradient)


def stream_gates(logits: Tensor, parameters: Tensor, family: str, pre_NM: Tensor, write: Tensor) -> None:
    """See `darlit.ops.cpu.stream_gates`."""
    tokens, streams = pre_NM.shape
    fixed = constants(logits, family, streams)
    stream_gates_kernel[(triton.cdiv(tokens, fixed["TOKENS"]),)](
        logits,
        parameters,
        pre_NM,
        write,
        tokens,
        **fixed,
        ITERATIONS=SINKHORN_ITERATIONS,
        num_warps=WARPS,
    )


def stream_gates_backward(
    pre_gradient: Tensor,
    write_gradient: Tensor,
    logits: Tensor,
    parameters: Tensor,
    family: str,
    logits_gradient: Tensor,
    parameters_gradient: Tensor,
) -> None:
    """See `darlit.ops.cpu.stream_gates_backward`."""
    tokens, streams = pre_gradient.shape
    fixed = constants(logits, family, streams)
    programs = triton.cdiv(tokens, fixed["TOKENS"])
    partial = parameters_gradient
    if programs > 1:
        partial = parameters_gradient.new_empty(programs, len(parameters))
    stream_gates_backward_kernel[(programs,)](
        pre_gradient,
        write_gradient,
        logits,
        parameters,
        logits_gradient,
        partial,
        tokens,
        **fixed,
        SEGMENTS=SEGMENTS,
        SEGMENT=SEGMENT,
        num_warps=WARPS,
    )
    if programs > 1:
        torch.sum(partial, 0, out=parameters_gradient)


def constants(logits: Tensor, family: str, streams: int) -> dict[str, Any]:
    """What the kernels are compiled for: n, the logits of a token, and which gates there are."""
    per_token, padded = logits.shape[-1], triton.next_power_of_2(streams)
    return {
        "N": streams,
        "C": per_token,
        "HC": family == "hc",
        "RES": family == "hc" or per_token > 2 * streams,
        "TOKENS": max(1, min(32, 256 // padded**2)),
        "PADDED": padded,
    }
