"""Tensors as kernels take them: rows ``[N, D]`` and float32 gates."""

from __future__ import annotations

import torch
from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """``[N, D]``, the last dimension contiguous; a view where the strides allow one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def dense(x: Tensor) -> Tensor:
    """``x`` where its second last stride is the distance of rows, else its `rows`.

    A contiguous tensor of one token a sequence may have any stride there.
    """
    return x if x.is_contiguous() and x.shape[-2] > 1 else rows(x)


def gate(values: Tensor | None) -> Tensor | None:
    """``[G]`` for all tokens, or ``[N, G]`` from ``[B, T, G]``; in float32 and contiguous."""
    if values is None or (values.dim() == 1 and values.dtype == torch.float32 and values.is_contiguous()):
        return values
    return (values if values.dim() == 1 else values.reshape(-1, values.shape[-1])).float().contiguous()


def gate_gradient(values: Tensor, gradient_NG: Tensor) -> Tensor:
    """What a gate gets of its gradient per token: the sum, where all tokens share it."""
    summed = gradient_NG.sum(0) if values.dim() == 1 else gradient_NG
    return summed.reshape(values.shape).to(values.dtype)
