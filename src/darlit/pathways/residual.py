"""The standard residual, ``x <- x + f_i(x)``: the baseline of every table.

At initialisation its logits are what the other pathways' are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from darlit.pathways.contract import Pathway, PathwayState, Probe, observe
from darlit.pathways.cost import Cost, residual_cost


@dataclass(kw_only=True)
class ResidualState(PathwayState):
    x_BTD: Tensor

    def _read(self, branch: int) -> Tensor:
        return self.x_BTD

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        self.x_BTD = self.x_BTD + output_BTD
        if self.pathway.ends_layer(branch):
            (self.x_BTD,) = observe(self.probe, self.pathway.depth(branch), (self.x_BTD,))

    def _finish(self) -> Tensor:
        return self.x_BTD


class Residual(Pathway):
    """One stream, no parameters. State kept: the running sum."""

    name = "residual"
    title = "Standard residual"
    source = "arXiv 1512.03385"
    keeps = "the running sum"

    def reset_parameters(self) -> None:
        """Nothing to set."""

    def cost(self) -> Cost:
        return residual_cost(self.num_branches)

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> ResidualState:
        (x_BTD,) = observe(probe, 0, (embedding_BTD,))
        return ResidualState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, x_BTD=x_BTD)
