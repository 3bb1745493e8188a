"""Rotary position embedding (RoPE, arXiv 2104.09864), the half-split form."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(length: int, head_width: int, base: float, device: torch.device | None = None) -> Tensor:
    """Cosines and sines ``[2, length, head_width / 2]`` in float32."""
    frequencies = base ** (-torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x_BHTE: Tensor, table: Tensor) -> Tensor:
    """Rotate ``[B, H, T, E]`` by position; ``table`` is ``[2, T, E / 2]``. Returns the dtype of ``x``."""
    cosine, sine = table.to(x_BHTE.dtype)
    left, right = x_BHTE.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
