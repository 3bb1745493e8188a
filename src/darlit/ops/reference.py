"""The oracle: depth reads and stream writes in plain PyTorch, any device, any dtype up to float64.

Shapes: B batch, T token, D width, R reads that a query row serves, S sources of one read.
Statistics, logits, softmax and gates are computed in float32 (float64 for float64 sources) whatever the
sources' dtype, also under autocast. Sources are taken one by one and never stacked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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
