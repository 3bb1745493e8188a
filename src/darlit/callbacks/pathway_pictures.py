"""Pictures of the pathway in TensorBoard while it trains: depth weights, gates and a small CKA map."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from darlit.pathways.contract import check_option
from darlit.probes import pictures
from darlit.probes.cka import cka_map
from darlit.probes.depth import DepthProbe
from darlit.probes.states import pathway_title, record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PathwayPictures(pl.Callback):
    """Draws the first batch of every n-th validation into the run's TensorBoard log; training is not touched.

    Args:
        every_n_validations: how often; 0 for never.
    """

    def __init__(self, every_n_validations: int = 0) -> None:
        check_option("every_n_validations", every_n_validations, every_n_validations >= 0, "at least 0 (never)")
        self.every_n_validations = every_n_validations
        self.validations = 0

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Tensor,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx != 0 or trainer.sanity_checking or trainer.state.fn != "fit" or not self.every_n_validations:
            return
        self.validations += 1
        if self.validations % self.every_n_validations:
            return
        module: Any = pl_module
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            drawings = _drawings(module.transformer, module.inputs_and_targets(batch)[0])
        if trainer.is_global_zero:
            self._log(trainer, drawings)

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = state_dict["validations"]

    def _log(self, trainer: pl.Trainer, drawings: dict[str, Callable[[], Figure]]) -> None:
        writers = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        for name, draw in drawings.items() if writers else ():
            pixels = pictures.as_image(draw)
            for writer in writers:
                writer.add_image(f"pathway/{name}", pixels, global_step=trainer.global_step, dataformats="HWC")


def _drawings(transformer: Any, tokens_BT: Tensor) -> dict[str, Callable[[], Figure]]:
    """What draws each picture that the pathway has something for."""
    title, probe = pathway_title(transformer), DepthProbe()
    transformer.hidden(tokens_BT, probe)
    profile = probe.profile(transformer.config.num_branches, tokens_BT.numel())
    drawings: dict[str, Callable[[], Figure]] = {}
    if record(transformer, tokens_BT[:1, :1]):  # a pathway need not show its states
        cka = cka_map(transformer, [tokens_BT])
        drawings["cka"] = lambda: pictures.draw_cka({title: cka})
    if profile.reads:
        drawings["depth_weights"] = lambda: pictures.draw_depth_weights({title: profile})
    if profile.gates:
        drawings["gates"] = lambda: pictures.draw_gates({title: profile})
    return drawings
