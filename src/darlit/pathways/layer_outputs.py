"""Mixing whole layer outputs with learned scalars: what DenseFormer and transparent attention have in common.

Inside a layer the residual is the standard one. After layer i, with X_i its output and X_0 the embedding,

    Y_i = sum_{j in S_i} A[i, j] X_j        the input of layer i + 1, after the last layer the final hidden state

A family says which outputs layer i mixes (S_i; empty: Y_i = X_i) and how its parameters give the row A[i].

Shapes: B batch, T token, D width, S sources of one mix, W mixing weights of all layers, row after row.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from darlit.ops import reference
from darlit.pathways.contract import Pathway, PathwayOptions, PathwayState, Probe, observe
from darlit.pathways.cost import Cost, mix_cost


@dataclass(kw_only=True)
class LayerOutputsState(PathwayState):
    x_BTD: Tensor
    """Y of the last complete layer, plus the branches written since."""
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """X_j of the layers that a mix sees."""

    def _read(self, branch: int) -> Tensor:
        return self.x_BTD

    def _write(self, branch: int, output_BTD: Tensor) -> None:
        self.x_BTD = self.x_BTD + output_BTD
        if self.pathway.ends_layer(branch):
            self._end_layer(self.pathway.depth(branch), branch)

    def _end_layer(self, layer: int, branch: int) -> None:
        pathway = self.pathway
        (self.x_BTD,) = observe(self.probe, layer, (self.x_BTD,))
        self.outputs = pathway.keep(self.outputs, layer, self.x_BTD)
        sources = pathway.sources[layer]
        if sources:
            weights_S = pathway.row(layer)
            if self.probe is not None:
                pathway.show(self.probe, branch, weights_S, self.x_BTD)
            self.x_BTD = reference.depth_mix([self.outputs[j] for j in sources], weights_S.unbind())

    def _finish(self) -> Tensor:
        return self.x_BTD


class LayerOutputs(Pathway):
    """Base of the pathways that mix layer outputs; subclasses give `sources_of` and `row`."""

    def __init__(self, num_branches: int, width: int, options: PathwayOptions, norm_eps: float) -> None:
        super().__init__(num_branches, width, options, norm_eps)
        self.sources = {layer: self.sources_of(layer) for layer in range(1, self.num_layers + 1)}
        self.seen = frozenset(j for sources in self.sources.values() for j in sources)
        sizes = [len(sources) for sources in self.sources.values()]
        self.first_weight = {layer: sum(sizes[: layer - 1]) for layer in self.sources}
        self.weights_W = nn.Parameter(torch.empty(sum(sizes)))
        self.reset_parameters()

    @abstractmethod
    def sources_of(self, layer: int) -> tuple[int, ...]:
        """The layers whose outputs are mixed after layer ``layer`` (1 to L), 0 for the embedding; empty: no mix."""

    @abstractmethod
    def row(self, layer: int) -> Tensor:
        """The mixing weights ``[S]`` of ``layer``, in the dtype of statistics."""

    @abstractmethod
    def show(self, probe: Probe, branch: int, weights_S: Tensor, x_BTD: Tensor) -> None:
        """Tell the probe the weights that are used after ``branch``."""

    def raw_row(self, layer: int) -> Tensor:
        """The parameters ``[S]`` of ``layer``, in the dtype of statistics."""
        first = self.first_weight[layer]
        return reference.upcast(self.weights_W[first : first + len(self.sources[layer])])

    def keep(self, outputs: dict[int, Tensor], layer: int, x_BTD: Tensor) -> dict[int, Tensor]:
        return {**outputs, layer: x_BTD} if layer in self.seen else outputs

    def cost(self) -> Cost:
        mixes = [len(sources) for sources in self.sources.values() if sources]
        return mix_cost(self.num_branches, len(self.seen), mixes)

    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> LayerOutputsState:
        self.check_embedding(embedding_BTD)
        (x_BTD,) = observe(probe, 0, (embedding_BTD,))
        outputs = self.keep({}, 0, x_BTD)
        return LayerOutputsState(pathway=self, probe=probe, embedding_BTD=embedding_BTD, x_BTD=x_BTD, outputs=outputs)
