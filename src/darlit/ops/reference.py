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
    logits = [depth_logits(written[key], queries_RD, eps) for key, queries_RD in zip(key_streams, queries_JRD, strict=True)]
    scales = [torch.rsqrt(upcast(x_ND).square().mean(-1) + eps) for x_ND in written]
    return written, torch.stack(logits, dim=1), torch.stack(scales, dim=-1)
