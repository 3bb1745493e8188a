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
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard, distribute_tensor

from darlit import sharded_checkpoint
from darlit.backbone import BackboneConfig, Transformer
from darlit.backbone.compiled import unwrapped
from darlit.backbone.experts import Experts
from darlit.backbone.initialise import whole
from darlit.backbone.transformer import Layer
from darlit.checkpoint_io import put_in_place, remove
from darlit.errors import DarlitError
from darlit.pathways.contract import check_option


class ShardedStrategy(ModelParallelStrategy):
    """Every device holds a shard; a checkpoint is a folder that any number of devices reads.

    Args:
        expert_parallel_size: ranks that the experts of a layer are split over, neighbours; tokens travel to them
            instead of the experts' weights to the tokens. 1: experts are gathered as all else.
    """

    def __init__(self, expert_parallel_size: int = 1) -> None:
        super().__init__(data_parallel_size="auto", tensor_parallel_size=1, save_distributed_checkpoint=True)
        name = "strategy.expert_parallel_size"
        check_option(name, expert_parallel_size, expert_parallel_size >= 1, "at least 1")
        self.expert_parallel_size = expert_parallel_size
        self.expert_mesh: DeviceMesh | None = None

    def setup_environment(self) -> None:
        ranks, size = self.num_nodes * self.num_processes, self.expert_parallel_size
        check_option("strategy.expert_parallel_size", size, ranks % size == 0, f"a divisor of the {ranks} devices")
        self._data_parallel_size = ranks  # Lightning's auto is the number of nodes
        super().setup_environment()
        if size > 1:
            names = ("expert_data", "expert")
            self.expert_mesh = init_device_mesh(self.root_device.type, (ranks // size, size), mesh_dim_names=names)

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


def shard(
    transformer: Transformer,
    mesh: DeviceMesh,
    device: torch.device,
    precision: str,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard a model over the ranks of a mesh, in place; one on the meta device gets its initial values shard by shard.

    Args:
        transformer: whole, or on the meta device.
        mesh: of one dimension.
        device: where this rank computes.
        precision: Lightning's name for it.
        expert_mesh: the same ranks as ``expert_data`` times ``expert``, to split experts over the latter.

    Raises:
        DarlitError: experts that cannot be split so.
    """
    root = MixedPrecisionPolicy(cast_forward_inputs=False)
    branches = replace(root, param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if "bf16" in precision else root
    if expert_mesh is not None:
        _check_experts(transformer.config, expert_mesh["expert"].size())
    for layer in map(unwrapped, transformer.layers):
        assert isinstance(layer, Layer)
        branch = layer.feed_forward
        matrices: list[Any] = [layer.attention.qkv, layer.attention.out]
        if isinstance(branch, Experts):
            fully_shard(branch.norm, mesh=mesh, reshard_after_forward=False, mp_policy=root)
            matrices += [branch if expert_mesh is None else branch.router]
        else:
            matrices += [branch.gate_up, branch.out]
        fully_shard(matrices, mesh=mesh, mp_policy=branches)
        if expert_mesh is not None and isinstance(branch, Experts):
            _split(branch, expert_mesh["expert"])
            fully_shard(branch, mesh=expert_mesh["expert_data"], mp_policy=branches)
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


def _check_experts(config: BackboneConfig, ranks: int) -> None:
    name = "strategy.expert_parallel_size"
    if config.experts == "megablocks" and config.num_experts:
        raise DarlitError(f"{name}={ranks} needs backbone.experts=torch, here it is megablocks: set one or the other")
    experts = config.num_experts
    allowed = f"a divisor of backbone.num_experts={experts}" if experts else "1, this model has no experts"
    check_option(name, ranks, experts > 0 and experts % ranks == 0, allowed)


def _split(experts: Experts, mesh: DeviceMesh) -> None:
    """Leave this rank the rows of its own experts."""
    for name, weight in experts.named_parameters(recurse=False):
        rows = distribute_tensor(weight.data, mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(rows))


def _draw_as_construction_does(transformer: Transformer) -> None:
    """Draw the values that PyTorch gives to layers when they are made, so that the next draws are one process's too."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not name.startswith("pathway"):
            with whole(module):
                module.reset_parameters()
