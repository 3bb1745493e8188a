"""What the pathway does: depth-weight entropy and largest weight, gates, per layer, at every validation."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from darlit.pathways import Probe
from darlit.pathways.contract import BRANCHES_PER_LAYER


class HealthProbe(Probe):
    """Means per quantity and layer of one forward pass; the final read counts as the layer after the last."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)

    def depth_weights(self, read: int, target: int, weights_BTS: Tensor) -> None:
        weights = weights_BTS.float()
        if weights.shape[-1] == 1:
            return
        entropy = torch.special.entr(weights).sum(-1).mean()
        self._add("entropy", read, entropy)
        self._add("largest_weight", read, weights.amax(-1).mean())

    def gate(self, name: str, branch: int, value: Tensor) -> None:
        self._add(name, branch, value.float().mean())

    def means(self) -> dict[str, float]:
        """Mean per ``quantity/layer_NN``, and over all layers under the quantity's own name."""
        means = {key: sum(values) / len(values) for key, values in self.values.items()}
        totals: dict[str, list[float]] = defaultdict(list)
        for key, mean in means.items():
            totals[key.split("/")[0]].append(mean)
        return {**{name: sum(values) / len(values) for name, values in totals.items()}, **means}

    def _add(self, name: str, branch: int, value: Tensor) -> None:
        self.values[f"{name}/layer_{branch // BRANCHES_PER_LAYER:02d}"].append(value.item())


class PathwayHealth(pl.Callback):
    """Runs the first validation batch once more with a probe; no cost in training."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Tensor,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx != 0 or trainer.sanity_checking:
            return
        probe = HealthProbe()
        module: Any = pl_module
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            module.transformer.hidden(module.inputs_and_targets(batch)[0], probe)
        self.latest = probe.means()
        if trainer.training or trainer.validating:
            pl_module.log_dict({f"pathway/{name}": value for name, value in self.latest.items()}, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        return {"latest": self.latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.latest = dict(state_dict["latest"])
