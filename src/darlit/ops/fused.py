# ruff: noqa: ARG001 - a registered fake has the operator's arguments, whether it looks at them or not
"""Depth reads and stream writes as two operators, each one node of the graph, over a backend of kernels.

**Backward by answers.** A read mixes S sources, so its backward would add to S gradients, each read, updated and
written again at every read: most of the traffic of a depth history. Instead each source hands out one *ticket* per
read that will see it, a tensor without memory whose gradient is the read's answer: the gradient ``g`` of the read's
output, which all its sources share, and per token the log-sum-exp, the shares and ``<g, h_j>``. When the last reader
of a source has answered, the source's own backward computes its whole gradient in one pass,

    a_ij = exp(logit_ij - lse_ij)     c_ij = share_ij a_ij     dlogit_ij = c_ij (<g_i, v^j> - <g_i, h_ij>)
    dv = sum_i c_ij g_i + sum_i dlogit_ij dlogit/dv

which is how FlashAttention (arXiv 2205.14135) gets the gradients of its keys and values. A history of R reads and S
sources then moves about R S / 2 gradients once instead of R S sources and twice as many gradients. Tickets are ordinary
tensors and the operators are functional, so activation checkpointing and torch.compile need to know nothing of it.

Kept for backward: the sources, a read's output and, where `spreads_pay`, ``h_j - h_0`` for J > 1 targets; else scalars
per token.

Shapes: B batch, T token, N = B T, D width, S sources of a read, M streams, J targets, R reads that see a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from darlit.ops.layout import backend, gate, gate_gradient, rows

TICKETS_PER_READ = 2
"""One for the gradient of the read's output, one for its scalars."""


def spreads_pay(sources: int, streams: int, targets: int) -> bool:
    """Whether a read of S sources keeps spreads for its backward, or looks at its sources again.

    Spreads are written once and read once, next to x; sources are read again, an embedding once for all its streams.
    Where both move the same, the sources are there anyway and the spreads would be kept for nothing.
    """
    return 2 * (targets - 1) + 1 < sources * streams - (streams - 1)


@torch.library.custom_op("darlit::stream_write", mutates_args=())
def stream_write(
    carried: list[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries: Tensor,
    key_streams: list[int],
    value_streams: list[int],
    eps: float,
    tickets: int,
    implementation: str,
) -> list[Tensor]:
    """The streams after a write, and what the reads to come need of them.

        written_m = rho carried_m + (1 - rho) carried_{M-1-m} + beta_m output
        logits_jr = <w_jr, RMSNorm(written of j's key stream)>

    Args:
        carried: M tensors ``[B, T, D]``; none: an empty partial.
        output: the branch's, ``[B, T, D]``; None: ``carried`` becomes a source as it is.
        rho: None (carry unchanged), ``[1]`` or ``[B, T, 1]``.
        beta: None (all ones), ``[M]`` or ``[B, T, M]``.
        queries: ``[J, R, D]`` of the reads that will see these streams.
        key_streams: per target, the stream of its keys.
        value_streams: per target, the stream of its values.
        eps: of the key norm.
        tickets: how many of the R reads get tickets; 0 or R.
        implementation: "cpu" or "triton".

    Returns:
        The M written streams (none without an output), logits ``[N, J, R]``, key scales ``[N, M]``, tickets.
    """
    written, logits_NJR, scale_NM, handed_out = _new_write(carried, output, beta, queries, tickets)
    backend(implementation).stream_write(
        [rows(x) for x in carried],
        None if output is None else rows(output),
        gate(rho),
        gate(beta),
        queries.float().contiguous(),
        key_streams,
        eps,
        [rows(x) for x in written],
        logits_NJR,
        scale_NM,
    )
    return [*written, logits_NJR, scale_NM, *handed_out]


@stream_write.register_fake
def _(
    carried: list[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries: Tensor,
    key_streams: list[int],
    value_streams: list[int],
    eps: float,
    tickets: int,
    implementation: str,
) -> list[Tensor]:
    written, logits_NJR, scale_NM, handed_out = _new_write(carried, output, beta, queries, tickets)
    return [*written, logits_NJR, scale_NM, *handed_out]


@torch.library.custom_op("darlit::stream_write_backward", mutates_args=())
def stream_write_backward(
    written: list[Tensor],
    logits: Tensor,
    scale: Tensor,
    gradients: list[Tensor],
    gradient_streams: list[int],
    answers: list[Tensor],
    answer_reads: list[int],
    carried: list[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries: Tensor,
    key_streams: list[int],
    value_streams: list[int],
    implementation: str,
) -> list[Tensor]:
    """Gradients of the carried streams, of the output, of the gates ``[N, M + 1]`` (betas, rho), of the queries.

    ``gradients`` belong to the streams ``gradient_streams``; ``answers`` are pairs, one pair a read in
    ``answer_reads``.
    """
    streams = scale.shape[1]
    by_stream: list[Tensor | None] = [None] * streams
    for stream, gradient in zip(gradient_streams, gradients, strict=True):
        by_stream[stream] = rows(gradient)
    carried_gradients, output_gradients, gates_gradients = _new_gradients(carried, output, scale)
    queries_gradient = torch.zeros_like(queries, dtype=torch.float32, memory_format=torch.contiguous_format)
    backend(implementation).stream_write_backward(
        [rows(x) for x in written],
        logits,
        scale,
        by_stream if gradients else [],
        [
            (read, rows(gradient), rows(scalars))
            for read, gradient, scalars in zip(answer_reads, answers[::2], answers[1::2], strict=True)
        ],
        [rows(x) for x in carried],
        None if output is None else rows(output),
        gate(rho),
        gate(beta),
        queries.float().contiguous(),
        key_streams,
        value_streams,
        [rows(x) for x in carried_gradients],
        rows(output_gradients[0]) if output_gradients else None,
        gates_gradients[0] if gates_gradients else None,
        queries_gradient,
    )
    return [*carried_gradients, *output_gradients, *gates_gradients, queries_gradient]


@stream_write_backward.register_fake
def _(
    written: list[Tensor],
    logits: Tensor,
    scale: Tensor,
    gradients: list[Tensor],
    gradient_streams: list[int],
    answers: list[Tensor],
    answer_reads: list[int],
    carried: list[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries: Tensor,
    key_streams: list[int],
    value_streams: list[int],
    implementation: str,
) -> list[Tensor]:
    carried_gradients, output_gradients, gates_gradients = _new_gradients(carried, output, scale)
    queries_gradient = torch.empty_like(queries, dtype=torch.float32, memory_format=torch.contiguous_format)
    return [*carried_gradients, *output_gradients, *gates_gradients, queries_gradient]


def _save_write(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    carried, added, rho, beta, queries, key_streams, value_streams, _, tickets, implementation = inputs
    streams = _count(carried, beta)
    written, (logits, scale) = (
        (carried, output[:2]) if added is None else (output[:streams], output[streams : streams + 2])
    )
    ctx.save_for_backward(*carried, *([] if added is None else [*written, added]), logits, scale, rho, beta, queries)
    ctx.num_carried, ctx.has_output, ctx.streams = len(carried), added is not None, streams
    ctx.routes, ctx.tickets, ctx.implementation = (key_streams, value_streams), tickets, implementation
    ctx.set_materialize_grads(False)


def _write_backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    *tensors, logits, scale, rho, beta, queries = ctx.saved_tensors
    carried = tensors[: ctx.num_carried]
    output = tensors[-1] if ctx.has_output else None
    written = tensors[ctx.num_carried : -1] if ctx.has_output else carried
    offset = ctx.streams if ctx.has_output else 0
    arrived = [(m, gradient) for m, gradient in enumerate(gradients[:offset]) if gradient is not None]
    tickets = gradients[offset + 2 :]
    answers = [
        (read, *pair)
        for read, pair in enumerate(zip(tickets[::2], tickets[1::2], strict=True))
        if pair[0] is not None and pair[1] is not None
    ]
    results = stream_write_backward(
        written,
        logits,
        scale,
        [gradient for _, gradient in arrived],
        [m for m, _ in arrived],
        [tensor for _, *pair in answers for tensor in pair],
        [read for read, *_ in answers],
        carried,
        output,
        rho,
        beta,
        queries,
        *ctx.routes,
        ctx.implementation,
    )
    carried_gradients, rest = results[: ctx.num_carried], results[ctx.num_carried :]
    output_gradient, rho_gradient, beta_gradient = None, None, None
    if output is not None:
        output_gradient, gates_NG = rest[:2]
        rho_gradient = None if rho is None else gate_gradient(rho, gates_NG[:, ctx.streams :])
        beta_gradient = None if beta is None else gate_gradient(beta, gates_NG[:, : ctx.streams])
    queries_gradient = rest[-1].to(queries.dtype)
    return (carried_gradients, output_gradient, rho_gradient, beta_gradient, queries_gradient, *[None] * 5)


stream_write.register_autograd(_write_backward, setup_context=_save_write)


@torch.library.custom_op("darlit::depth_read", mutates_args=())
def depth_read(
    sources: list[Tensor],
    logits: list[Tensor],
    columns: list[int],
    tickets: list[Tensor],
    shares: Tensor,
    value_streams: list[int],
    keep_spreads: bool,
    implementation: str,
) -> list[Tensor]:
    """``x = sum_j share_j h_j``, ``h_j = sum_s softmax_s(logits_js) v^j_s``.

    Args:
        sources: S times M tensors ``[B, T, D]``, the streams of a source side by side; no gradient flows here.
        logits: S tensors ``[N, J, R_s]``.
        columns: per source, which of its R_s columns belongs to this read.
        tickets: two per source, or none where no gradient is wanted.
        shares: ``[J]`` or ``[B, T, J]``; they sum to one over J.
        value_streams: per target, the stream of its values.
        keep_spreads: whether to return ``h_j - h_0`` for the backward, which else reads the sources again.
        implementation: "cpu" or "triton".

    Returns:
        x ``[B, T, D]``, the log-sum-exp ``[N, J]``, and J - 1 spreads ``[B, T, D]`` where asked for.
    """
    out, lse_NJ, *spreads = _new_read(sources, value_streams, keep_spreads)
    backend(implementation).depth_read(
        [rows(x) for x in sources],
        logits,
        columns,
        gate(shares),
        value_streams,
        rows(out),
        [rows(x) for x in spreads],
        lse_NJ,
    )
    return [out, lse_NJ, *spreads]


@depth_read.register_fake
def _(
    sources: list[Tensor],
    logits: list[Tensor],
    columns: list[int],
    tickets: list[Tensor],
    shares: Tensor,
    value_streams: list[int],
    keep_spreads: bool,
    implementation: str,
) -> list[Tensor]:
    return _new_read(sources, value_streams, keep_spreads)


@torch.library.custom_op("darlit::depth_read_backward", mutates_args=())
def depth_read_backward(
    gradient: Tensor,
    out: Tensor | None,
    spreads: list[Tensor],
    sources: list[Tensor],
    logits: list[Tensor],
    columns: list[int],
    lse: Tensor,
    shares: Tensor,
    value_streams: list[int],
    implementation: str,
) -> Tensor:
    """What a read answers to its sources, ``[N, 3 J]``: log-sum-exp, shares and ``<gradient, h_j>`` per target.

    From ``out`` and its spreads or, without them, from the sources.
    """
    answer_N3J = lse.new_empty(lse.shape[0], 3 * lse.shape[1])
    backend(implementation).depth_read_backward(
        rows(gradient),
        None if out is None else rows(out),
        [rows(x) for x in spreads],
        [rows(x) for x in sources],
        logits,
        columns,
        lse,
        gate(shares),
        value_streams,
        answer_N3J,
    )
    return answer_N3J


@depth_read_backward.register_fake
def _(
    gradient: Tensor,
    out: Tensor | None,
    spreads: list[Tensor],
    sources: list[Tensor],
    logits: list[Tensor],
    columns: list[int],
    lse: Tensor,
    shares: Tensor,
    value_streams: list[int],
    implementation: str,
) -> Tensor:
    return lse.new_empty(lse.shape[0], 3 * lse.shape[1])


def _save_read(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    sources, logits, columns, tickets, shares, value_streams, _, implementation = inputs
    out, lse, *spreads = output
    from_output = len(spreads) == len(value_streams) - 1
    ctx.save_for_backward(lse, shares, *([out, *spreads] if from_output else [*sources, *logits]))
    ctx.from_output, ctx.columns, ctx.value_streams = from_output, columns, value_streams
    ctx.counts, ctx.implementation = (len(sources), len(logits), len(tickets)), implementation
    ctx.set_materialize_grads(False)


def _read_backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    lse, shares, *kept = ctx.saved_tensors
    num_sources, num_logits, num_tickets = ctx.counts
    nothing: tuple[Any, ...] = ([None] * num_sources, [None] * num_logits, None)
    gradient = gradients[0]
    if gradient is None:
        return (*nothing, [None] * num_tickets, None, None, None, None)
    mixed = (
        (kept[0], kept[1:], [], [], [])
        if ctx.from_output
        else (None, [], kept[:num_sources], kept[num_sources:], ctx.columns)
    )
    answer_N3J = depth_read_backward(gradient, *mixed, lse, shares, ctx.value_streams, ctx.implementation)
    shares_gradient = gate_gradient(shares, answer_N3J[:, 2 * lse.shape[1] :])
    tickets = [gradient, answer_N3J] * (num_tickets // TICKETS_PER_READ)
    return (*nothing, tickets, shares_gradient, None, None, None)


depth_read.register_autograd(_read_backward, setup_context=_save_read)


def _count(carried: Sequence[Tensor], beta: Tensor | None) -> int:
    """M: the streams that exist, or as many as there are betas for an empty partial."""
    if carried:
        return len(carried)
    return 1 if beta is None else beta.shape[-1]


def _new_write(
    carried: list[Tensor], output: Tensor | None, beta: Tensor | None, queries: Tensor, tickets: int
) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    """Uninitialised: written streams, logits ``[N, J, R]``, key scales ``[N, M]``; and the tickets."""
    like = carried[0] if output is None else output
    streams, tokens = _count(carried, beta), like.numel() // like.shape[-1]
    targets, reads, _ = queries.shape
    contiguous = torch.contiguous_format
    written = [] if output is None else [torch.empty_like(like, memory_format=contiguous) for _ in range(streams)]
    logits_NJR = like.new_empty(tokens, targets, reads, dtype=torch.float32)
    scale_NM = like.new_empty(tokens, streams, dtype=torch.float32)
    return written, logits_NJR, scale_NM, _tickets(like, targets, tickets)


def _tickets(like: Tensor, targets: int, reads: int) -> list[Tensor]:
    tokens = like.numel() // like.shape[-1]
    return [
        ticket
        for _ in range(reads)
        for ticket in (
            like.new_zeros(()).expand(like.shape),
            like.new_zeros((), dtype=torch.float32).expand(tokens, 3 * targets),
        )
    ]


def _new_read(sources: list[Tensor], value_streams: list[int], keep_spreads: bool) -> list[Tensor]:
    like, targets = sources[0], len(value_streams)
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    lse_NJ = like.new_empty(like.numel() // like.shape[-1], targets, dtype=torch.float32)
    spreads = [torch.empty_like(out) for _ in range(targets - 1 if keep_spreads else 0)]
    return [out, lse_NJ, *spreads]


def _new_gradients(
    carried: list[Tensor], output: Tensor | None, scale: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    contiguous = torch.contiguous_format
    carried_gradients = [torch.empty_like(x, memory_format=contiguous) for x in carried]
    if output is None:
        return carried_gradients, [], []
    gates_NG = scale.new_empty(scale.shape[0], scale.shape[1] + 1)
    return carried_gradients, [torch.empty_like(output, memory_format=contiguous)], [gates_NG]
