"""Rescue gain: does one clean stream bring back what the model would have said?

At depth r the states of all streams are corrupted, and then all but stream j. With KL(clean || intervened) the mean
over tokens of the divergence between the next-token distributions,

    gain_j  = 1 - KL_keep_j / KL_none           1: stream j alone restores the output; 0: it restores nothing
    balance = min_j gain_j / max_j gain_j       1: all streams serve alike; 0: one of them serves nothing

The span says which states count as those at depth r:

    at      the states at depth r alone: of a pathway that keeps a history, one source among many
    up_to   those at depths 0 to r: everything that the layers after depth r can read of those before; a kept stream
            has its clean states at all of them

Depths start at 1: at depth 0 all streams are one embedding.

Shapes: B batch, T token, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from darlit.backbone import Transformer
from darlit.errors import DarlitError
from darlit.probes.states import Place, Replacement, depths_and_streams, pathway_title, record

Corruption = Literal["sequence", "mean", "zero"]
"""The state of the same token of another sequence of the batch; the batch's mean state; zero."""
CORRUPTIONS: tuple[Corruption, ...] = get_args(Corruption)
Span = Literal["at", "up_to"]

SMALLEST_KL = 1e-7
"""Nats. A corruption that changes less than this is rounding noise, and a gain relative to it would be too."""


@dataclass(frozen=True)
class RescueCurve:
    """Of one corruption: divergences in nats by depth."""

    corruption: Corruption
    span: Span
    depths: list[int]
    kl_none: list[float]
    """All streams corrupted."""
    kl_keep: list[list[float]]
    """By stream: all but this one corrupted."""
    tokens: int

    @property
    def gains(self) -> list[list[float]]:
        """By stream and depth; NaN where corrupting everything changes nothing."""
        return [
            [
                1 - keep / none if none > SMALLEST_KL else math.nan
                for keep, none in zip(by_depth, self.kl_none, strict=True)
            ]
            for by_depth in self.kl_keep
        ]

    @property
    def balance(self) -> list[float]:
        """By depth: least over largest gain, negative gains counted as 0; NaN where no stream restores anything."""
        by_depth = zip(*self.gains, strict=True)
        return [max(min(gains), 0) / max(gains) if max(gains) > 0 else math.nan for gains in by_depth]


def rescue_curve(
    transformer: Transformer,
    batches: Iterable[Tensor],
    corruption: Corruption = "sequence",
    span: Span = "at",
    on_batch: Callable[[], object] = lambda: None,
) -> RescueCurve:
    """Rescue gains of every stream at every depth.

    Args:
        transformer: in evaluation mode.
        batches: token ids ``[B, T]`` on its device, B at least 2 for ``sequence``.
        corruption: what takes the place of a state.
        span: which depths a corruption covers.
        on_batch: called after each batch.

    Raises:
        ValueError: a pathway with one stream, no batches, or a single sequence with nothing to exchange.
    """
    num_depths, num_streams = depths_and_streams(transformer)
    check_streams(pathway_title(transformer), num_streams)
    depths = range(1, num_depths)
    # Column 0: nothing kept; column 1 + j: stream j kept.
    sums = torch.zeros(len(depths), 1 + num_streams, dtype=torch.float64)
    tokens = 0
    for tokens_BT in batches:
        clean = record(transformer, tokens_BT)
        corrupted = {place: corrupt(state_BTD, corruption) for place, state_BTD in clean.items()}
        clean_BTD = _hidden(transformer, tokens_BT, {})
        for row, depth in enumerate(depths):
            for column, kept in enumerate([None, *range(num_streams)]):
                states = intervention(clean, corrupted, depth, kept, span)
                changed_BTD = _hidden(transformer, tokens_BT, states)
                sums[row, column] += summed_kl(transformer, clean_BTD, changed_BTD)
        tokens += tokens_BT.numel()
        on_batch()
    if tokens == 0:
        raise ValueError("rescue gain of no batches is not defined; give at least one")
    none, *keep = (sums / tokens).T.tolist()
    return RescueCurve(corruption, span, list(depths), none, keep, tokens)


def check_streams(title: str, num_streams: int) -> None:
    """Refuse the question where it makes no sense.

    Raises:
        DarlitError: one stream.
    """
    if num_streams < 2:
        raise DarlitError(
            f"rescue gain asks which of several streams carries the output, and {title} has one; "
            "give a pathway with two streams or more (dar, mhc, hyper_connections)"
        )


def intervention(
    clean: dict[Place, Tensor], corrupted: dict[Place, Tensor], depth: int, kept: int | None, span: Span
) -> dict[Place, Tensor]:
    """The states to put in place for a corruption of ``span`` ``depth`` that keeps one stream, or none, clean."""
    first = depth if span == "at" else 0
    return {
        place: clean[place] if place[1] == kept else corrupted[place] for place in clean if first <= place[0] <= depth
    }


def corrupt(state_BTD: Tensor, corruption: Corruption) -> Tensor:
    """What takes the place of a state.

    Raises:
        ValueError: ``sequence`` with a single sequence.
    """
    if corruption == "zero":
        return torch.zeros_like(state_BTD)
    if corruption == "mean":
        return state_BTD.mean((0, 1), keepdim=True).expand_as(state_BTD)
    if len(state_BTD) < 2:
        raise DarlitError("corruption 'sequence' exchanges sequences of a batch and has only one; give 2 or more")
    return state_BTD.roll(1, dims=0)


def summed_kl(transformer: Transformer, clean_BTD: Tensor, changed_BTD: Tensor) -> float:
    """``sum over tokens of KL(clean || changed)`` in nats, of next-token distributions from final hidden states.

    Logits exist for ``loss_chunk_tokens`` tokens at a time; the divergence is computed in float64.
    """
    total, chunk = 0.0, transformer.config.loss_chunk_tokens
    pairs: Sequence[tuple[Tensor, Tensor]] = list(
        zip(clean_BTD.flatten(0, 1).split(chunk), changed_BTD.flatten(0, 1).split(chunk), strict=True)
    )
    for clean_ND, changed_ND in pairs:
        log_clean_NV, log_changed_NV = (
            F.linear(hidden_ND, transformer.head_weight).double().log_softmax(-1)
            for hidden_ND in (clean_ND, changed_ND)
        )
        total += F.kl_div(log_changed_NV, log_clean_NV, reduction="sum", log_target=True).item()
    return total


@torch.no_grad()
def _hidden(transformer: Transformer, tokens_BT: Tensor, states: dict[Place, Tensor]) -> Tensor:
    return transformer.hidden(tokens_BT, Replacement(states))
