"""What a training step will need and what is free, said before the first step rather than by its failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from darlit.backbone.step_memory import PRECISIONS, Placement, StepMemory, activation_bytes, step_memory
from darlit.free_memory import free_bytes, readable
from darlit.modules import LanguageModule
from darlit.modules.sharding import is_sharded


class MemoryEstimate(pl.Callback):
    """Says in one line what a step will need, and warns when that is more than is free. It never refuses.

    On a CPU every process counts what is free for itself alone. It takes a second or more, for a forward and a
    backward pass of tensors without memory.

    Args:
        enabled: false skips it.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModule)
        precision = str(trainer.precision)
        if not self.enabled or not trainer.is_global_zero or precision not in PRECISIONS:
            return
        model, data = pl_module.transformer, trainer.datamodule  # type: ignore[attr-defined]
        device = pl_module.device
        placement = Placement(
            precision, "cuda" if device.type == "cuda" else "cpu", trainer.world_size, is_sharded(model)
        )
        try:
            need = step_memory(model, data.batch_size, placement)
        except Exception as error:  # a pathway of one's own may do what tensors without values cannot
            reason = " ".join(str(error).split())[:200]
            rank_zero_warn(f"no estimate of this step's memory: its passes do not run without values ({reason})")
            return
        rank_zero_info(_line(need, device))
        free, held = free_bytes(device), held_bytes(trainer, pl_module)
        if need.total - held <= free:
            return
        recompute = ""
        if not model.config.checkpoint_layers:
            less = replace(need, activations=activation_bytes(model, data.batch_size, placement, True))
            recompute = f"backbone.checkpoint_layers true ({readable(less.total)} in all), "
        shards = "" if is_sharded(model) else " with --config configs/trainer/fsdp.yaml"
        rank_zero_warn(
            f"this run needs about {readable(need.total - held)} more on {device} and {readable(free)} are free: it "
            f"may fail in its first step. Try {recompute}a data.batch_size below {data.batch_size}, or "
            f"more devices{shards}"
        )


def held_bytes(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int:
    """Of the parts of the estimate, what this process has allocated already: parameters, and moments after a resume."""
    moments = [
        value
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    tensors = [*pl_module.parameters(), *moments]
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, a whole one itself."""
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _line(need: StepMemory, device: torch.device) -> str:
    parts = ", ".join(f"{name} {readable(size)}" for name, size in vars(need).items() if size)
    return f"memory of a step on {device}, estimated: {parts}; in all {readable(need.total)}"
