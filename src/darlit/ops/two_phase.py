"""The first of two phases of Block reads: what several reads to come get of the sources that are complete.

Queries do not depend on the input, so the logits of a source for all later reads exist once it is written. When a
block is complete, the completed sources are therefore read once for all P reads of the next block. The second phase is
an ordinary `darlit.ops.fused.depth_read`: it takes a read's mixes as one source, their log-sum-exp as that source's
logits, and the block under way as the other. A softmax over parts is the softmax over the whole,

    h = (exp(lse_c) h_c + exp(lse_p) h_p) / (exp(lse_c) + exp(lse_p))

which is how FlashAttention (arXiv 2205.14135) merges tiles. The backward knows nothing of it: a read answers to its
true sources, and each of these has always computed its gradient for all its readers at once.

Shapes: B batch, T token, N = B T, D width, S completed sources, M streams, J targets, P reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from darlit.ops.layout import backend, rows


def two_phases_pay(reads: int, sources: int, values: int, targets: int) -> bool:
    """Whether P reads of S completed sources move fewer tensors in two phases.

    ``values`` of a source's streams are read as values, but of the embedding one: its streams are one tensor. One phase
    reads these 1 + V (S - 1) tensors P times. Two phases read them once, write J mixes for each read, and read them.
    """
    completed = 1 + values * (sources - 1)
    return completed + 2 * reads * targets < reads * completed


@torch.library.custom_op("darlit::depth_mixes", mutates_args=())
def depth_mixes(
    sources: list[Tensor],
    logits: list[Tensor],
    columns: list[int],
    reads: int,
    value_streams: list[int],
    implementation: str,
) -> list[Tensor]:
    """``h_pj = sum_s softmax_s(logits_jps) v^j_s`` for P reads in a row. No gradient flows: see `fused.depth_read`.

    Args:
        sources: S times M tensors ``[B, T, D]``, the streams of a source side by side.
        logits: S tensors ``[N, J, R_s]``.
        columns: per source, which of its R_s columns belongs to the first of the reads.
        reads: P.
        value_streams: per target, the stream of its values.
        implementation: "cpu" or "triton".

    Returns:
        P times J mixes ``[B, T, D]``, those of a read side by side, and the log-sum-exp ``[N, J, P]`` in float32.
    """
    *mixes, lse_NJP = _new_mixes(sources, reads, value_streams)
    backend(implementation).depth_mixes(
        [rows(x) for x in sources], logits, columns, value_streams, [rows(x) for x in mixes], lse_NJP
    )
    return [*mixes, lse_NJP]


@depth_mixes.register_fake
def _(
    sources: list[Tensor],
    logits: list[Tensor],  # noqa: ARG001 - a registered fake has the operator's arguments
    columns: list[int],  # noqa: ARG001
    reads: int,
    value_streams: list[int],
    implementation: str,  # noqa: ARG001
) -> list[Tensor]:
    return _new_mixes(sources, reads, value_streams)


def _new_mixes(sources: list[Tensor], reads: int, value_streams: list[int]) -> list[Tensor]:
    like, targets = sources[0], len(value_streams)
    mixes = [torch.empty_like(like, memory_format=torch.contiguous_format) for _ in range(reads * targets)]
    return [*mixes, like.new_empty(like.numel() // like.shape[-1], targets, reads, dtype=torch.float32)]
