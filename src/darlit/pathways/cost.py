"""What a pathway costs, counted from its mathematics and not from any implementation.

A vector is one tensor of D channels of one token. Traffic is the least that a fused implementation moves: a source
is read once per read, an entry is written once, a scalar per token is free. The branch's own reading of its input and
writing of its output belong to the branch. Forward pass only.

Shapes: D width, S sources of one read, J targets of one read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """One forward pass, per token.

    Args:
        kept: vectors alive after the last branch, the pathway's whole state.
        moved: vectors that the pathway reads and writes, over all branches and the final read.
        flops: floating-point operations per channel of D, over all branches and the final read.
    """

    kept: int
    moved: int
    flops: int


@dataclass(frozen=True)
class ReadCost:
    """Moved vectors and flops per channel of all reads of a depth history, and how many entries it ends with."""

    entries: int
    moved: int
    flops: int


def history_cost(
    num_branches: int,
    first_choice: int,
    ends_block: Callable[[int], bool],
    partial_is_source: bool,
    key_streams: tuple[int, ...],
    value_streams: tuple[int, ...],
) -> ReadCost:
    """Walk through the reads of AttnRes or DAR.

    A read mixes S sources of every value stream, two flops a channel; targets that share a stream share its mix.
    An entry's key is normalised once (two flops a channel) and multiplied with the queries of all reads to come;
    it is in cache then, so this moves nothing. A partial's logits serve one read.
    """
    targets, keys, values = len(key_streams), len(set(key_streams)), len(set(value_streams))

    def logits(reads: int) -> int:
        return 2 * keys + 2 * targets * reads

    entries, partial, moved, flops = 1, False, 0, logits(num_branches + 1 - first_choice)
    for read in range(num_branches + 1):
        if read >= first_choice:
            sources = entries + (partial and partial_is_source)
            moved += values * sources + 1
            flops += 2 * values * sources + (logits(1) if partial and partial_is_source else 0)
        if read < num_branches:
            partial = not ends_block(read)
            if not partial:
                entries += 1
                flops += logits(num_branches + 1 - max(read + 1, first_choice))
    return ReadCost(entries=entries, moved=moved, flops=flops)
