"""The oracle: depth reads, stream writes and widened streams in plain PyTorch, any device, any dtype up to float64.

Shapes: B batch, T token, D width, R reads that a query row serves, S sources of one read.
Statistics, logits, softmax and gates are computed in float32 (float64 for float64 sources) whatever the
sources' dtype, also under autocast. Sources are taken one by one and never stacked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

SINKHORN_ITERATIONS = 20
"""Those of mHC (arXiv 2512.24880)."""


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of statistics: float32, or float64 where it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x_BTD: Tensor, rows_RD: Tensor) -> Tensor:
    """``x @ rows^T``, ``[B, T, R]`` in the dtype of statistics, also where autocast would narrow it."""
    with torch.autocast(x_BTD.device.type, enabled=False):
        x_BTD = wide(x_BTD)
        return F.linear(x_BTD, rows_RD.to(x_BTD.dtype))


def rms_norm(x_BTD: Tensor, eps: float) -> Tensor:
    """Gain-free RMSNorm over the last dimension, in the dtype of statistics."""
    x_BTD = wide(x_BTD)
    return x_BTD * torch.rsqrt(x_BTD.square().mean(-1, keepdim=True) + eps)


def depth_logits(source_BTD: Tensor, queries_RD: Tensor, eps: float) -> Tensor:
    """Logits ``<w_r, RMSNorm(source)>`` of one source for R queries at once, ``[B, T, R]``.

    AttnRes (arXiv 2603.15031) with a gain-free key norm and no 1/sqrt(D). The norm is applied to the R scalars
    instead of the D channels, so no normalised copy of the source exists.
    """
    x_BTD = wide(source_BTD)
    scale_BT1 = torch.rsqrt(x_BTD.square().mean(-1, keepdim=True) + eps)
    return linear(x_BTD, queries_RD) * scale_BT1


def depth_mix(sources: Sequence[Tensor], coefficients: Sequence[Tensor]) -> Tensor:
    """``sum_s c_s * source_s``: S sources ``[B, T, D]``, S coefficients ``[B, T]``; returns the sources' dtype.

    Raises:
        ValueError: no source, or sources that differ in shape or dtype.
    """
    if not sources:
        raise ValueError("a depth read needs at least one source, got none: call start() before read()")
    first = sources[0]
    for source in sources:
        if source.shape != first.shape or source.dtype != first.dtype:
            raise ValueError(
                f"sources of one read must agree: got {tuple(first.shape)} {first.dtype} "
                f"and {tuple(source.shape)} {source.dtype}"
            )
    mixed = coefficients[0].unsqueeze(-1) * first
    for source, coefficient in zip(sources[1:], coefficients[1:], strict=True):
        mixed = mixed + coefficient.unsqueeze(-1) * source
    return mixed.to(first.dtype)


def transport(streams: tuple[Tensor, Tensor], rho: Tensor) -> tuple[Tensor, Tensor]:
    """Doubly stochastic exchange ``P^j <- rho P^j + (1 - rho) P^{1-j}`` of DAR (arXiv 2607.18730).

    ``rho`` is a scalar or ``[B, T, 1]``. The sum of the streams is carried unchanged, their difference shrinks by
    ``2 rho - 1``. Written as a step towards the other stream, so that equal streams stay equal to the last bit.
    """
    one, two = streams
    step = (1 - rho) * (two - one)
    return (one + step).to(one.dtype), (two - step).to(two.dtype)


def stream_write(
    carried: Sequence[Tensor] | None, output_BTD: Tensor, rho: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, ...]:
    """``P^j <- rho P^j + (1 - rho) P^{1-j} + beta^j y``: the streams after a branch's gated output.

    Args:
        carried: the streams before; None: they start empty.
        output_BTD: y.
        rho: None (carried as they are), or two streams are exchanged: ``[1]`` or ``[B, T, 1]``.
        beta: ``[M]`` or ``[B, T, M]`` of M streams; None: one stream takes y as it is.
    """
    if beta is None:
        added: tuple[Tensor, ...] = (output_BTD,)
    else:
        added = tuple((weight.unsqueeze(-1) * output_BTD).to(output_BTD.dtype) for weight in beta.unbind(-1))
    if carried is None:
        return added
    if rho is not None:
        carried = transport((carried[0], carried[1]), rho)
    return tuple(p_BTD + y_BTD for p_BTD, y_BTD in zip(carried, added, strict=True))


def stream_mix(sources: Sequence[Tensor], coefficients: Tensor) -> list[Tensor]:
    """``out_o = sum_s c[o, s] source_s``: S sources ``[B, T, D]``, coefficients ``[O S]`` or ``[B, T, O S]``."""
    rows = coefficients.unflatten(-1, (-1, len(sources))).unbind(-2)
    return [depth_mix(sources, row.unbind(-1)) for row in rows]


def vector_logits(streams: Sequence[Tensor], weights_CMD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``RMSNorm(vec(streams)) @ weights^T`` with one gain-free norm over M streams, and the norm's scale.

    Args:
        streams: G times M tensors ``[B, T, D]``; each group of M has its own norm, all groups have the same weights.
        weights_CMD: C rows of M D channels.
        eps: of the norm.

    Returns:
        Logits ``[G, B, T, C]`` and scales ``[G, B, T]``, both without G where there is one group.
    """
    together = weights_CMD.shape[1]
    logits, scales = [], []
    for first in range(0, len(streams), together):
        group = streams[first : first + together]
        dots = [linear(x_BTD, w_CD) for x_BTD, w_CD in zip(group, weights_CMD.unbind(1), strict=True)]
        squares = [wide(x_BTD).square().mean(-1) for x_BTD in group]
        scales.append(torch.rsqrt(torch.stack(squares).mean(0) + eps))
        logits.append(torch.stack(dots).sum(0) * scales[-1].unsqueeze(-1))
    return (logits[0], scales[0]) if len(logits) == 1 else (torch.stack(logits), torch.stack(scales))


def stream_gates(logits: Tensor, parameters_P: Tensor, family: str, streams: int) -> tuple[Tensor, Tensor]:
    """Coefficients of one branch with n widened streams: what it reads and how its output is written.

        hc    pre = a + alpha tanh(l)         post = b + beta tanh(l)            res = r + alpha tanh(l)
        mhc   pre = sigmoid(scale l + bias)   post = 2 sigmoid(scale l + bias)   res = Sinkhorn(exp(scale l + bias))

    Args:
        logits: hc: ``[n, ..., n + 2]``, of each stream those of its pre, its post and what it gives to every stream.
            mhc: ``[..., C]``, n of pre, n of post and the n^2 of res, or without these: res is the identity.
        parameters_P: biases (a, b, r) in this order, those of res by the stream that is written; then the scales:
            alpha, beta or those of pre, post and, with res, res.
        family: "hc" or "mhc".
        streams: n.

    Returns:
        ``pre [..., n]`` and ``write [..., n (n + 1)]``: of each written stream o its ``res[o, :]``, then ``post[o]``.
    """
    n, bias_P = streams, wide(parameters_P)
    if family == "hc":
        parts = logits.tanh().movedim(0, -1)  # [..., c, s]
        alpha, beta = bias_P[-2:]
        pre = bias_P[:n] + alpha * parts[..., 0, :]
        post = bias_P[n : 2 * n] + beta * parts[..., 1, :]
        res = bias_P[2 * n : -2].view(n, n) + alpha * parts[..., 2:, :]
    else:
        pre_scale, post_scale, *res_scale = bias_P[logits.shape[-1] :]
        pre = (pre_scale * logits[..., :n] + bias_P[:n]).sigmoid()
        post = 2 * (post_scale * logits[..., n : 2 * n] + bias_P[n : 2 * n]).sigmoid()
        if res_scale:
            res = doubly_stochastic((res_scale[0] * logits[..., 2 * n :] + bias_P[2 * n : -3]).unflatten(-1, (n, n)))
        else:
            res = torch.eye(n, dtype=post.dtype, device=post.device).expand(*post.shape, n)
    return pre, torch.cat([res, post.unsqueeze(-1)], dim=-1).flatten(-2)


def doubly_stochastic(logits: Tensor) -> Tensor:
    """The doubly stochastic matrix ``[..., N, N]`` of ``exp(logits)``: in closed form for N = 2, else by Sinkhorn."""
    if logits.shape[-1] != 2:
        return sinkhorn(logits, SINKHORN_ITERATIONS)
    (a, b), (c, d) = (row.unbind(-1) for row in wide(logits).unbind(-2))
    half = (a + d - b - c) / 2
    stay, swap = half.sigmoid(), (-half).sigmoid()
    return torch.stack([torch.stack([stay, swap], -1), torch.stack([swap, stay], -1)], -2)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """``exp(logits)`` ``[..., N, N]`` with columns, then rows, divided by their sums, ``iterations`` times.

    Computed with logarithms in the dtype of statistics, so that it is finite for logits far apart.
    """
    log_matrix = wide(logits)
    for _ in range(iterations):
        log_matrix = log_matrix.log_softmax(-2).log_softmax(-1)
    return log_matrix.exp()
