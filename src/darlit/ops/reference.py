"""The oracles: every operator in plain PyTorch, any device, any dtype up to float64.

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


def upcast(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of statistics: float32, or float64 where it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x_BTD: Tensor, rows_RD: Tensor) -> Tensor:
    """``x @ rows^T``, ``[B, T, R]`` in the dtype of statistics, also where autocast would narrow it."""
    with torch.autocast(x_BTD.device.type, enabled=False):
        x_BTD = upcast(x_BTD)
        return F.linear(x_BTD, rows_RD.to(x_BTD.dtype))


def rms_norm(x_BTD: Tensor, eps: float) -> Tensor:
    """Gain-free RMSNorm over the last dimension, in the dtype of statistics."""
    x_BTD = upcast(x_BTD)
    return x_BTD * torch.rsqrt(x_BTD.square().mean(-1, keepdim=True) + eps)


def depth_logits(source_BTD: Tensor, queries_RD: Tensor, eps: float) -> Tensor:
    """Logits ``<w_r, RMSNorm(source)>`` of one source for R queries at once, ``[B, T, R]``.

    AttnRes (arXiv 2603.15031) with a gain-free key norm and no 1/sqrt(D). The norm is applied to the R scalars
    instead of the D channels, so no normalised copy of the source exists.
    """
    x_BTD = upcast(source_BTD)
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


def depth_read(
    streams: Sequence[Sequence[Tensor]], logits: Sequence[Tensor], shares: Tensor, value_streams: Sequence[int]
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Oracle of a read: ``x = sum_j share_j h_j``, the spreads ``h_j - h_0``, and the log-sum-exp ``[N, J]``.

    Args:
        streams: per source, its M streams ``[N, D]``.
        logits: per source, those of this read, ``[N, J]``.
        shares: ``[J]`` or ``[N, J]``.
        value_streams: per target, the stream of its values.
    """
    logits_SNJ = torch.stack(list(logits))
    weights_SNJ = logits_SNJ.softmax(0)
    mixes = []
    for target, stream in enumerate(value_streams):
        values_SND = torch.stack([source[stream] for source in streams])
        mixes.append(torch.einsum("sn,snd->nd", weights_SNJ[..., target], values_SND))
    x_ND = sum(shares[..., target, None] * mix for target, mix in enumerate(mixes))
    return x_ND, [mix - mixes[0] for mix in mixes[1:]], logits_SNJ.logsumexp(0)  # type: ignore[return-value]


def depth_prefetch(
    streams: Sequence[Sequence[Tensor]], logits: Sequence[Tensor], value_streams: Sequence[int]
) -> tuple[list[list[Tensor]], Tensor]:
    """Oracle of a prefetch: per read and target ``h_pj [N, D]``, and the log-sum-exp ``[N, J, P]``.

    ``logits``: per source, those of P reads, ``[N, J, P]``; the rest as in `depth_read`.
    """
    logits_SNJP = torch.stack(list(logits))
    weights_SNJP = logits_SNJP.softmax(0)
    values = [torch.stack([source[stream] for source in streams]) for stream in value_streams]
    mixes = [
        [torch.einsum("sn,snd->nd", weights_SNJP[..., target, read], of) for target, of in enumerate(values)]
        for read in range(logits_SNJP.shape[-1])
    ]
    return mixes, logits_SNJP.logsumexp(0)


def stream_write(
    carried: Sequence[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries_JRD: Tensor,
    key_streams: Sequence[int],
    eps: float,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Oracle of a write: the streams ``[N, D]`` after it, their logits ``[N, J, R]`` and key norms' scales ``[N, M]``.

    Args:
        carried: M streams; none: the block is empty.
        output: None: the streams are ``carried`` as it is.
        rho: ``[1]`` or ``[N, 1]``, two streams are exchanged; None: they are not.
        beta: ``[M]`` or ``[N, M]``; None: all ones.
    """
    written = list(carried)
    if written and rho is not None:
        written = [rho * written[m] + (1 - rho) * written[1 - m] for m in range(2)]
    if output is not None:
        count = len(carried) if carried else 1 if beta is None else beta.shape[-1]
        added = [output if beta is None else beta[..., m, None] * output for m in range(count)]
        written = [a + b for a, b in zip(written, added, strict=True)] if written else added
    logits = [
        depth_logits(written[key], queries_RD, eps) for key, queries_RD in zip(key_streams, queries_JRD, strict=True)
    ]
    scales = [torch.rsqrt(upcast(x_ND).square().mean(-1) + eps) for x_ND in written]
    return written, torch.stack(logits, dim=1), torch.stack(scales, dim=-1)


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
        squares = [upcast(x_BTD).square().mean(-1) for x_BTD in group]
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
    n, bias_P = streams, upcast(parameters_P)
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
    (a, b), (c, d) = (row.unbind(-1) for row in upcast(logits).unbind(-2))
    half = (a + d - b - c) / 2
    stay, swap = half.sigmoid(), (-half).sigmoid()
    return torch.stack([torch.stack([stay, swap], -1), torch.stack([swap, stay], -1)], -2)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """``exp(logits)`` ``[..., N, N]`` with columns, then rows, divided by their sums, ``iterations`` times.

    Computed with logarithms in the dtype of statistics, so that it is finite for logits far apart.
    """
    log_matrix = upcast(logits)
    for _ in range(iterations):
        log_matrix = log_matrix.log_softmax(-2).log_softmax(-1)
    return log_matrix.exp()
