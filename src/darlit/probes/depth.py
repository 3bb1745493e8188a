"""Depth weights and gates: what each read selects, and how branches' outputs are shared among streams.

Sums over tokens in float64; memory depends on the pathway alone.

Shapes: B batch, T token, S sources of one read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from darlit.backbone import Transformer
from darlit.errors import DarlitError
from darlit.pathways import Probe
from darlit.probes.states import pathway_title


@dataclass(frozen=True)
class Read:
    """One softmax over sources: that of one query of a branch, or of the final read."""

    read: int
    """Branch index, or the number of branches for the final read."""
    target: int
    """Which of the read's queries; in DAR the stream that it reads for."""
    weights: list[float]
    """Mean over tokens, by source; 0 is the embedding, the last one may be the current block."""
    entropy: float
    """Mean over tokens of the entropy in nats; ln S where all sources count alike."""
    largest_weight: float
    """Mean over tokens of the largest weight."""


@dataclass(frozen=True)
class Gate:
    """One gate of one branch, mean over tokens."""

    name: str
    branch: int
    labels: list[str]
    """Of its components: ``0``, ``1``, or ``row,column``."""
    values: list[float]


@dataclass(frozen=True)
class DepthProfile:
    """What a pathway's probe shows of its selection, in the order of the branches."""

    num_branches: int
    reads: list[Read]
    gates: list[Gate]
    tokens: int


class DepthProbe(Probe):
    """Sums of depth weights and gates over any number of forward passes."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, int], Tensor] = {}
        self._entropy: dict[tuple[int, int], float] = defaultdict(float)
        self._largest: dict[tuple[int, int], float] = defaultdict(float)
        self._gates: dict[tuple[str, int], Tensor] = {}
        self._seen: dict[tuple[object, int], int] = defaultdict(int)

    def depth_weights(self, read: int, target: int, weights_BTS: Tensor) -> None:
        place, weights_NS = (read, target), weights_BTS.detach().flatten(0, 1).double()
        self._weights[place] = self._weights.get(place, 0) + weights_NS.sum(0).cpu()
        self._entropy[place] += torch.special.entr(weights_NS).sum().item()
        self._largest[place] += weights_NS.amax(-1).sum().item()
        self._seen[place] += len(weights_NS)

    def gate(self, name: str, branch: int, value: Tensor) -> None:
        # A static gate is a vector or a matrix; one per token has the tokens' two dimensions before that.
        value = value.detach().double()
        per_token = value.flatten(0, 1) if value.ndim > 2 else value.unsqueeze(0)
        place = (name, branch)
        self._gates[place] = self._gates.get(place, 0) + per_token.sum(0).cpu()
        self._seen[place] += len(per_token)

    def profile(self, num_branches: int, tokens: int) -> DepthProfile:
        """Means over all tokens so far."""
        reads = [
            Read(
                *place,
                (total_S / self._seen[place]).tolist(),
                self._entropy[place] / self._seen[place],
                self._largest[place] / self._seen[place],
            )
            for place, total_S in sorted(self._weights.items())
        ]
        gates = [
            Gate(*place, _labels(total.shape), (total / self._seen[place]).flatten().tolist())
            for place, total in self._gates.items()
        ]
        return DepthProfile(num_branches, reads, gates, tokens)


def depth_profile(
    transformer: Transformer, batches: Iterable[Tensor], on_batch: Callable[[], object] = lambda: None
) -> DepthProfile:
    """Mean depth weights and gates over batches of token ids ``[B, T]``.

    Raises:
        DarlitError: a pathway without depth weights and gates.
        ValueError: no batches.
    """
    probe, tokens = DepthProbe(), 0
    for tokens_BT in batches:
        with torch.no_grad():
            transformer.hidden(tokens_BT, probe)
        tokens += tokens_BT.numel()
        on_batch()
    if tokens == 0:
        raise ValueError("depth weights of no batches are not defined; give at least one")
    profile = probe.profile(transformer.config.num_branches, tokens)
    check_profile(pathway_title(transformer), profile)
    return profile


def check_profile(title: str, profile: DepthProfile) -> None:
    """Refuse the question where it makes no sense.

    Raises:
        DarlitError: neither depth weights nor gates.
    """
    if not profile.reads and not profile.gates:
        raise DarlitError(
            f"depth weights ask what a read selects and gates how streams share, and {title} has neither: "
            "every branch reads one running sum; give another pathway"
        )


def _labels(shape: torch.Size) -> list[str]:
    if len(shape) == 2:
        return [f"{row},{column}" for row in range(shape[0]) for column in range(shape[1])]
    return [str(component) for component in range(shape[0])]
