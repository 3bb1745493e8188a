"""The losses of single tokens, gathered from all ranks into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from darlit.atomic import partial_file
from darlit.backbone.loss import IGNORED


class PredictionFile(pl.Callback):
    """Writes the loss of every target token, float32 ``[sequences, T]`` in nats, in the order of the split.

    The file is the same for any number of devices and any batch size, up to rounding. It is complete or absent.

    Args:
        path: where to; an earlier file is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batches: list[Tensor] = []

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = []

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Tensor,
        batch: Tensor,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Gather one batch ``[B, T]`` of every rank. A rank may have fewer rows in the last one, or a filler row."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        rows_BT = outputs.new_zeros((data.batch_size, outputs.shape[1]))
        real_B = torch.zeros(data.batch_size, dtype=torch.bool, device=outputs.device)
        rows_BT[: len(outputs)] = outputs
        real_B[: len(outputs)] = (batch[:, 1:] != IGNORED).any(dim=1)
        rows, real = (pl_module.all_gather(tensor) for tensor in (rows_BT, real_B))  # ranks first where there are more
        assert isinstance(rows, Tensor)
        assert isinstance(real, Tensor)
        if trainer.is_global_zero:
            self._batches.append(rows[real].cpu())

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        losses_NT = torch.cat(self._batches)
        with partial_file(self.path) as partial:
            torch.save(losses_NT, partial)
        rank_zero_info(f"loss of every token of {len(losses_NT)} sequences: {self.path}")
