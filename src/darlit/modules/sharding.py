"""Training in shards (FSDP2): which parameters travel together, in which dtype, and what a checkpoint is.

Every rank keeps a slice of each parameter, its gradient and its moments, and gathers a layer's matrices while it works
in them. A layer takes and returns a pathway's state, which FSDP cannot look into, so the group that is gathered
together is not the layer but the matrices of its branches. The embedding, all norms, the head and the pathway are the
root's: gathered once a forward pass and kept until the backward pass is over, as every read needs the pathway.

Under a bf16 precision the matrices travel as bf16, in which autocast would multiply them anyhow, and the root's group
in float32: norms and the pathway's statistics, softmax and gates are those of one process. Gradients are averaged in
float32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from darlit import sharded_checkpoint
from darlit.backbone import Transformer
from darlit.backbone.initialise import whole
from darlit.backbone.transformer import Layer
from darlit.checkpoint_io import put_in_place, remove

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedStrategy(ModelParallelStrategy):
    """Every device holds a shard; a checkpoint is a folder that any number of devices reads."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size="auto", tensor_parallel_size=1, save_distributed_checkpoint=True)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes  # Lightning's auto is the number of nodes
        super().setup_environment()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder in which every rank has its files; under its name it is whole or not there."""
        path = Path(self.broadcast(filepath))
        partial = path.with_name(f".{path.name}.part")
        if self.is_global_zero:
            remove(partial)
        self.barrier()
        super().save_checkpoint(checkpoint, partial, storage_options)
        self.barrier()
        if self.is_global_zero:
            put_in_place(partial, path)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if not sharded_checkpoint.is_sharded(path):  # one file, of weights to be evaluated
            return super().load_checkpoint(path, weights_only=weights_only)
        model = self.model
        assert model is not None
        weights = get_model_state_dict(model)
        sharded_checkpoint.load_into({"state_dict": weights}, path)
        set_model_state_dict(model, weights)
        for number, optimizer in enumerate(self.optimizers):
            moments = get_optimizer_state_dict(model, optimizer)
            sharded_checkpoint.load_into({f"optimizer_{number}": moments}, path)
            set_optimizer_state_dict(model, optimizer, moments)
        return sharded_checkpoint.read_values(path)


def shard(transformer: Transformer, mesh: DeviceMesh, device: torch.device, precision: str) -> None:
    """Shard a model over the ranks of a mesh, in place; one on the meta device gets its initial values shard by shard.

    Args:
        transformer: whole, or on the meta device.
        mesh: of one dimension.
        device: where this rank computes.
        precision: Lightning's name for it.
    """
    root = MixedPrecisionPolicy(cast_forward_inputs=False)
    branches = replace(root, param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if "bf16" in precision else root
    for layer in transformer.layers:
        assert isinstance(layer, Layer)
        matrices = [module for branch in (layer.attention, layer.feed_forward) for module in _matrices(branch)]
        for module in matrices:
            for gain in _norms(module):
                fully_shard(gain, mesh=mesh, reshard_after_forward=False, mp_policy=root)
        fully_shard(matrices, mesh=mesh, mp_policy=branches)
    fully_shard(transformer, mesh=mesh, mp_policy=root)
    for door in ("hidden", "losses"):
        register_fsdp_forward_method(transformer, door)
    if any(parameter.is_meta for parameter in transformer.parameters()):
        transformer.to_empty(device=device)
        _draw_as_construction_does(transformer)
        transformer.reset_parameters()


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` has been here."""
    return isinstance(module, FSDPModule)


def _matrices(branch: nn.Module) -> list[nn.Module]:
    """The modules of a branch that hold its matrices: its linear layers, or itself where it has parameters."""
    if next(branch.parameters(recurse=False), None) is not None:
        return [branch]
    return [module for module in branch.children() if not isinstance(module, nn.RMSNorm)]


def _norms(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.modules() if isinstance(child, nn.RMSNorm)]


def _draw_as_construction_does(transformer: Transformer) -> None:
    """Draw the values that PyTorch gives to layers when they are made, so that the next draws are one process's too."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not name.startswith("pathway"):
            with whole(module):
                module.reset_parameters()
