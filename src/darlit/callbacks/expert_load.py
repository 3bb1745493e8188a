"""How evenly routers spread tokens over experts, per layer, as scalars and one histogram a layer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from darlit.callbacks.meters import Meters


class ExpertLoad(pl.Callback):
    """Counts the assignments of each optimiser step over all micro-batches and ranks; idle without experts.

    Logged per layer: the fullest expert's load over the mean (1 at best), the entropy of the loads over that of equal
    ones (1 at best), and the share of assignments that no expert computed (dropless experts: 0).
    """

    def __init__(self, meters: Meters) -> None:
        self.meters = meters
        self._counts_LE: Tensor | None = None
        self._assigned = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        if "tokens_per_expert" not in outputs:
            return
        counts_LE = outputs["tokens_per_expert"]
        module: Any = pl_module
        self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE
        self._assigned += batch[:, 1:].numel() * module.backbone.experts_per_token
        if not self.meters.step_complete:
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:
            counts_LE = trainer.strategy.reduce(self._counts_LE.double(), reduce_op="sum")
            loads = expert_load(counts_LE, self._assigned * trainer.world_size)
            pl_module.log_dict(loads, batch_size=1, rank_zero_only=False)
            self._draw(trainer, counts_LE)
        self._counts_LE, self._assigned = None, 0

    def _draw(self, trainer: pl.Trainer, counts_LE: Tensor) -> None:
        """One bucket an expert, as high as its load over the mean."""
        if not isinstance(trainer.logger, TensorBoardLogger):
            return
        layers, experts = counts_LE.shape
        for layer in range(layers):
            over_mean_E = counts_LE[layer] / counts_LE[layer].mean()
            index = torch.arange(experts, dtype=torch.double)
            trainer.logger.experiment.add_histogram_raw(
                f"experts/load/layer_{layer:02d}",
                min=0.0,
                max=float(experts),
                num=experts,
                sum=float(over_mean_E.sum()),
                sum_squares=float(over_mean_E.square().sum()),
                bucket_limits=(index + 1).tolist(),
                bucket_counts=over_mean_E.tolist(),
                global_step=trainer.global_step,
            )


def expert_load(counts_LE: Tensor, assigned: int) -> dict[str, float]:
    """Evenness of ``counts_LE`` of ``assigned`` assignments a layer; under ``experts/<name>/layer_NN``."""
    shares_LE = counts_LE / counts_LE.sum(-1, keepdim=True).clamp(min=1)
    experts = counts_LE.shape[-1]
    measures = {
        "max_over_mean": shares_LE.amax(-1) * experts,
        "entropy": torch.special.entr(shares_LE).sum(-1) / torch.tensor(float(experts)).log(),
        "dropped": 1 - counts_LE.sum(-1) / assigned,
    }
    return {
        f"experts/{name}/layer_{layer:02d}": float(value)
        for name, values_L in measures.items()
        for layer, value in enumerate(values_L)
    }
