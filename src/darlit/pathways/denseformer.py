"""DenseFormer (arXiv 2402.02622): after a layer, a weighted sum of all layer outputs so far.

    Y_i = sum_{j <= i} A[i, j] X_j        X_0 the embedding, X_i the output of layer i from input Y_{i-1}

A is static, unconstrained, and may be negative. Dilation k keeps the j with ``i - j`` a multiple of k; period p mixes
after every p-th layer only. Inside a layer the residual is the standard one.

At initialisation A[i, i] = 1 and the rest 0, so Y_i = X_i: the logits equal the standard residual's exactly, to the
last bit while all values are finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from darlit.pathways.contract import PathwayOptions, Probe, check_option
from darlit.pathways.layer_outputs import LayerOutputs


@dataclass(frozen=True)
class DenseFormerOptions(PathwayOptions):
    """Options of DenseFormer.

    Args:
        dilation: k, layer i sees the outputs of layers i, i - k, i - 2k, ...
        period: p, a mix after every p-th layer.
    """

    dilation: int = 1
    period: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("dilation", self.dilation, self.dilation >= 1, "at least 1")
        check_option("period", self.period, self.period >= 1, "at least 1")


class DenseFormer(LayerOutputs):
    """One stream. State kept: the layer outputs that a mix sees. Parameters: one scalar per mix and source."""

    name = "denseformer"
    title = "DenseFormer"
    source = "arXiv 2402.02622"
    keeps = "every layer's output"
    Options = DenseFormerOptions

    def __init__(self, num_branches: int, width: int, options: DenseFormerOptions, norm_eps: float) -> None:
        super().__init__(num_branches, width, options, norm_eps)
        for option in ("dilation", "period"):
            value = getattr(options, option)
            check_option(option, value, value <= self.num_layers, f"1 to {self.num_layers}")

    @property
    def period(self) -> int:
        return math.lcm(self.options.dilation, self.options.period)

    def sources_of(self, layer: int) -> tuple[int, ...]:
        if layer % self.options.period:
            return ()
        return tuple(range(layer % self.options.dilation, layer + 1, self.options.dilation))

    def reset_parameters(self) -> None:
        own = [float(j == layer) for layer, sources in self.sources.items() for j in sources]
        with torch.no_grad():
            self.weights_W.copy_(torch.tensor(own))

    def row(self, layer: int) -> Tensor:
        return self.raw_row(layer)

    def show(self, probe: Probe, branch: int, weights_S: Tensor, x_BTD: Tensor) -> None:
        """Not a distribution over depths, so it is shown as a gate."""
        probe.gate("mix", branch, weights_S)
