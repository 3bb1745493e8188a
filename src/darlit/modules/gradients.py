"""Norms and clipping of gradients, whole or sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def total_norm(tensors: Iterable[Tensor], order: float = 2.0) -> Tensor:
    """The norm of all tensors as one vector, a scalar; of sharded ones over all ranks, which all must ask for it."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device_mesh if isinstance(tensor, DTensor) else None].append(tensor)
    norms = [_full(nn.utils.get_total_norm(group, order)) for group in groups.values()]
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms, order)


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, on any rank."""
    return bool(total_norm([torch.isfinite(tensor).logical_not().float()]) == 0)  # a norm of them may overflow


def clip(parameters: Iterable[nn.Parameter], limit: float, norm: Tensor) -> None:
    """Scale all gradients by ``limit / norm`` where the norm is above the limit."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    for group in groups.values():
        nn.utils.clip_grads_with_norm_(group, limit, norm)


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
