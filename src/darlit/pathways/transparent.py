"""Transparent attention (arXiv 1808.07561) for a decoder alone [ours]: a layer reads a mixture of layer outputs.

    Y_i = sum_{j <= i} softmax_j(s_i) X_j        X_0 the embedding, X_i the output of layer i from input Y_{i-1}

In the paper each decoder layer attends to its own softmax mixture of all encoder layers. With a decoder only, layer
i + 1 takes the place of the decoder layer and layers 0 to i that of the encoder; one weight vector s_i per mix, static,
and a last one for the final norm. Inside a layer the residual is the standard one.

At initialisation s = 0 and Y_i is the mean of X_0 ... X_i. Layer outputs are running states, so this is not the
residual sum in another scale: early outputs count more often than late ones, and from the second layer on the logits
differ from the standard residual's at any scale of the weights. There is no bound to state.
"""

from __future__ import annotations

from torch import Tensor, nn

from darlit.pathways.contract import Probe
from darlit.pathways.layer_outputs import LayerOutputs


class Transparent(LayerOutputs):
    """One stream. State kept: the embedding and every layer's output. Parameters: one logit per mix and source."""

    name = "transparent"
    title = "Transparent attention"
    source = "arXiv 1808.07561"
    keeps = "every layer's output"

    def sources_of(self, layer: int) -> tuple[int, ...]:
        return tuple(range(layer + 1))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weights_W)

    def row(self, layer: int) -> Tensor:
        return self.raw_row(layer).softmax(dim=0)

    def show(self, probe: Probe, branch: int, weights_S: Tensor, x_BTD: Tensor) -> None:
        probe.depth_weights(branch + 1, 0, weights_S.expand(*x_BTD.shape[:-1], -1))
