"""Recording the streams' states of a forward pass, and putting others in their place.

Shapes: B batch, T token, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from darlit.backbone import Transformer
from darlit.errors import DarlitError
from darlit.pathways import Probe

Place = tuple[int, int]
"""(depth, stream); depth 0 is the embedding."""


class Recorder(Probe):
    """Keeps every stream's state at every depth of one forward pass, detached."""

    def __init__(self) -> None:
        self.states: dict[Place, Tensor] = {}
        """``[B, T, D]`` by place."""

    def source(self, depth: int, stream: int, value_BTD: Tensor) -> Tensor:
        self.states[depth, stream] = value_BTD.detach()
        return value_BTD


class Replacement(Probe):
    """Puts given states ``[B, T, D]`` in the place of a forward pass's own; all other places are left alone."""

    def __init__(self, states: Mapping[Place, Tensor]) -> None:
        self.states = states

    def source(self, depth: int, stream: int, value_BTD: Tensor) -> Tensor:
        return self.states.get((depth, stream), value_BTD)


def record(transformer: Transformer, tokens_BT: Tensor) -> dict[Place, Tensor]:
    """The states ``[B, T, D]`` at every place of one forward pass, without gradients."""
    recorder = Recorder()
    with torch.no_grad():
        transformer.hidden(tokens_BT, recorder)
    return recorder.states


def pathway_title(transformer: Transformer) -> str:
    """The pathway's name in prose; one of your own need not have a title."""
    return getattr(transformer.pathway, "title", transformer.pathway.name)


def depths_and_streams(transformer: Transformer) -> tuple[int, int]:
    """How many depths and streams a pathway shows, from a forward pass over one token.

    Raises:
        DarlitError: a pathway that shows none.
    """
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=transformer.head_weight.device)
    places = record(transformer, token_11)
    if not places:
        raise DarlitError(
            f"{pathway_title(transformer)} shows no states; let its start and _write call "
            "darlit.pathways.contract.observe (CONTRIBUTING.md)"
        )
    return 1 + max(depth for depth, _ in places), 1 + max(stream for _, stream in places)
