"""Initial values of a model that no process holds as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


@contextmanager
def whole(*modules: nn.Module) -> Iterator[None]:
    """Within, sharded parameters that ``modules`` own are whole tensors on the CPU; then each rank keeps its shards.

    What draws values need not know of shards, and draws those that one process would: every rank draws all of them,
    one module at a time. Parameters that are not sharded stay as they are.
    """
    sharded = [
        (owner, name, parameter)
        for owner in modules
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    for owner, name, parameter in sharded:
        owner._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu"))
    try:
        yield
        for owner, name, parameter in sharded:
            full = owner._parameters[name]
            assert full is not None
            # No rank is the source: all have drawn the same.
            shard = distribute_tensor(full.data, parameter.device_mesh, parameter.placements, src_data_rank=None)
            with torch.no_grad():
                parameter.copy_(shard)
    finally:
        for owner, name, parameter in sharded:
            owner._parameters[name] = parameter
