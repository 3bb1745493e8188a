"""The standard residual, ``x <- x + f_i(x)``: the baseline of every table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from darlit.pathways.contract import BRANCHES_PER_LAYER, Pathway, PathwayState, Probe, observe


@dataclass(kw_only=True)
class ResidualState(PathwayState):
    x_BTD: Tensor

    def _read(self, branch: int) -> Tensor:
        return self.x_BTD

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        self.x_BTD = self.x_BTD + output_BTD
        depth, branch_in_layer = divmod(branch + 1, BRANCHES_PER_LAYER)
        if branch_in_layer == 0:
            (self.x_BTD,) = observe(self.probe, depth, (self.x_BTD,))

    def _finish(self) -> Tensor:
        return self.x_BTD


class Residual(Pathway):
    """One stream, no parameters. State kept: the running sum."""

    name = "residual"

    def reset_parameters(self) -> None:
        """Nothing to set."""

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> ResidualState:
        (x_BTD,) = observe(probe, 0, (embedding_BTD,))
        return ResidualState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, x_BTD=x_BTD)
