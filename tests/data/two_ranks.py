"""FSDP2 on two CPU ranks for the models of these tests."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy


def sharded() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
