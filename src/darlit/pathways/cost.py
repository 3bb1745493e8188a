"""What a pathway costs, counted from its mathematics and not from any implementation: one count for the table of
pathways, the plan and the bench.

A vector is one tensor of D channels of one token. Traffic is the least that a fused implementation moves: a source
is read once per read, an entry is written once, a scalar per token is free. The branch's own reading of its input and
writing of its output belong to the branch.

Shapes: D width, S sources of one read, J targets of one read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from darlit.ops.depth import prefetch_pays

if TYPE_CHECKING:
    from darlit.pathways.history import Layout


@dataclass(frozen=True)
class Cost:
    """One pass, per token.

    Args:
        kept: vectors alive after the last branch, the pathway's complete state.
        moved: vectors that the pathway reads and writes in the forward pass, over all branches and the final read.
        flops: floating-point operations per channel of D in the forward pass, over all branches and the final read.
        step: vectors that the fused algorithm must move forward and backward, each once per operator that needs it
            (docs/performance.md); None: not counted.
    """

    kept: int
    moved: int
    flops: int
    step: int | None = None


def residual_cost(branches: int) -> Cost:
    """A write reads the sum and the branch's output and writes the sum: one addition. Backward, the gradient of a read
    is added to the one carried."""
    return Cost(kept=1, moved=3 * branches, flops=branches, step=3 * branches + branches)


def mix_cost(branches: int, kept: int, mixes: list[int]) -> Cost:
    """Standard residuals, and ``mixes`` sums of so many layer outputs; the last sum is alive beside the outputs."""
    moved = 3 * branches + sum(size + 1 for size in mixes)
    return Cost(kept=kept + 1, moved=moved, flops=branches + sum(2 * size for size in mixes))


def streams_cost(branches: int, streams: int, flops_per_branch: int, flops_of_exchanges: int = 0) -> Cost:
    """n widened streams. A read takes n streams and makes one vector; a write takes the streams and the output and
    makes n; at the end they are summed."""
    n = streams
    flops = branches * flops_per_branch + flops_of_exchanges + n - 1
    return Cost(kept=n, moved=branches * (3 * n + 2) + n + 1, flops=flops)


def history_cost(layout: Layout, streams: int, gated: bool) -> Cost:
    """A depth history of AttnRes (one stream, running sums) or DAR (``gated`` writes of two).

    A read mixes S sources of every value stream, two flops a channel; targets that share a stream share its mix.
    An entry's key is normalised once (two flops a channel) and multiplied with the queries of all reads to come;
    it is in cache then, so this moves nothing. The logits of a block that is being written serve one read.
    """
    blocks, branches = layout.blocks, layout.blocks.num_branches
    targets, keys, values = len(layout.key_streams), len(set(layout.key_streams)), len(set(layout.value_streams))

    def logits(reads: int) -> int:
        return 2 * keys + 2 * targets * reads

    entries, partial, moved, flops = 1, False, 0, logits(branches + 1 - layout.first_choice)
    for read in range(branches + 1):
        if read >= layout.first_choice:
            seen = partial and layout.include_partial
            moved += values * (entries + seen) + 1
            flops += 2 * values * (entries + seen) + (logits(1) if seen else 0)
        if read < branches:
            partial = not blocks.ends(read)
            if not partial:
                entries += 1
                flops += logits(branches + 1 - max(read + 1, layout.first_choice))
    empty = 0 if layout.carry_partial else entries - 1
    carrying = branches - empty
    if gated:
        # A write into an empty block takes the output and makes two streams, a product each; one that carries takes
        # two streams more, exchanges them (four flops) and adds.
        moved, flops = moved + 3 * empty + 5 * carrying, flops + 2 * empty + 8 * carrying
    else:
        # Adding to a running sum takes two vectors and makes one; an output that is an entry by itself is only read.
        moved, flops = moved + 3 * carrying + empty, flops + carrying
    return Cost(streams * entries, moved, flops, _history_step(layout, streams, gated))


def _history_step(layout: Layout, streams: int, gated: bool) -> int:
    """A read takes its S sources of M streams and makes x and J - 1 spreads; where prefetching pays, the completed
    sources are read once for a block and each of its reads takes J mixes of them instead. A write takes the output and
    the carried streams and makes new ones. Backward, a read takes its gradient, x and the spreads, and a write takes
    the gradients of the A reads that saw it, its streams and what arrived for them, the carried streams and the output,
    and makes the gradients of both.
    """
    blocks, branches = layout.blocks, layout.blocks.num_branches
    ends = [branch for branch in range(branches) if blocks.ends(branch)]
    moved = 1 + 1 + branches + 1  # the embedding's logits; its gradient: itself, its readers' gradients, the sum
    sources, ahead = 1, range(0)
    for read in range(1, branches + 1):
        partial = read - 1 not in ends
        sources += not partial
        completed = 1 + streams * (sources - 1)  # the embedding's streams are one tensor
        if not partial:
            ahead = blocks.reads_of_next(read - 1)
            if prefetch_pays(len(ahead), sources, streams, streams):
                moved += completed + streams * len(ahead)
            else:
                ahead = range(0)
        moved += (streams if read in ahead else completed) + streams * partial + 1 + (streams - 1)  # x, spread
        moved += 2 + (streams - 1)  # backward: gradient, x, spread
    for branch in range(branches):
        carried = streams * (branch % blocks.size != 0)
        readers = branches - branch if branch in ends else 1
        arrived = 0 if branch in ends else streams
        if gated:
            moved += 1 + carried + streams + readers + streams + arrived + carried + 1 + 1 + carried
        else:
            # An output that is an entry is only read for its logits. A running sum is a plain addition.
            moved += 1 + (3 if carried else 0) + readers + 1 + 1 + (3 if arrived else 0)
    return moved
