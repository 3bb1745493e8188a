"""Depth reads and stream writes as autograd nodes, one a call, over a backend of kernels.

**Incoming gradients.** A read mixes S sources, so its usual backward would add to S gradients, each read, updated and
written again at every read: most of the traffic of a depth history. Here a read only records what its sources need:
the gradient ``g`` of its output and, per token and target, the log-sum-exp, the share and ``<g, h_j>``. The backward of
a source then computes its complete gradient in one pass over the records of the reads that saw it,

    a_ij = exp(logit_ij - lse_ij)     c_ij = share_ij a_ij     dlogit_ij = c_ij (<g_i, v^j> - <g_i, h_ij>)
    dv = sum_i c_ij g_i + sum_i dlogit_ij dlogit/dv

which is how FlashAttention (arXiv 2205.14135) gets the gradients of its keys and values. A history of R reads and S
sources moves about R S / 2 gradients once instead of R S sources and twice as many gradients.

**Ordering edge.** Every call takes and returns an empty tensor, so that the graph is a chain and autograd runs the
calls backward in the reverse order: when a source runs, all reads that saw it have recorded. Sources are therefore no
arguments of a read, and a call has a fixed number of them.

**Records belong to one backward pass**, by its autograd graph task: a second pass through a kept graph, a partial one
and accumulation each have their own. Forks of a state share earlier sources; a record says which sources it saw.

Kept for backward: the sources, a read's output and, where `spreads_pay`, ``h_j - h_0`` for J > 1 targets.

Shapes: B batch, T token, N = B T, D width, S sources of a read, M streams, J targets, R reads that see a source.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, Variable

from darlit.errors import DarlitError
from darlit.ops.rows import dense, gate, gate_gradient

Streams = tuple[Tensor, ...]
SPREAD_MARGIN = 2
"""Tensors that a read would rather move again in its backward pass than keep its spreads until then."""


def spreads_pay(sources: int, streams: int, targets: int) -> bool:
    """Whether a read of S sources keeps its J - 1 spreads for its backward, or looks at its sources again.

    Spreads are written once and read once, next to x; sources are read again, an embedding once for all its streams.
    """
    return 2 * (targets - 1) + 1 + SPREAD_MARGIN < sources * streams - (streams - 1)


def prefetch_pays(reads: int, sources: int, values: int, targets: int) -> bool:
    """Whether P reads of S completed sources move fewer tensors where these are mixed ahead for all P.

    ``values`` of a source's streams are read as values, but of the embedding one: its streams are one tensor. One phase
    reads these 1 + V (S - 1) tensors P times. Two phases read them once, write J mixes for each read, and read them.
    """
    completed = 1 + values * (sources - 1)
    return completed + 2 * reads * targets < reads * completed


class Source:
    """The states of all streams at one depth, and the logits ``[N, J, R]`` of the reads that will see them."""

    __slots__ = ("addresses", "first_read", "ident", "logits", "rows", "scale", "slot", "streams", "trained")

    def __init__(self, streams: Streams, first_read: int, ident: int, slot: int) -> None:
        self.streams = streams
        self.first_read = first_read
        self.ident = ident
        self.slot = slot
        """Its place among the completed ones; -1: a block that is being written."""
        self.rows: Streams = ()
        self.logits: Any = None
        self.scale: Any = None
        self.addresses: Any = None
        """Of a source that is in no table."""
        self.trained = False
        """Whether the queries get a gradient through it: it was written with gradients."""


class SourceTable:
    """Completed sources, appended to and shared: a history is a table and a count. Forks that append get a copy."""

    def __init__(self, call: Pass, capacity: int) -> None:
        self.sources: list[Source] = []
        self.idents: list[int] = []
        self.addresses = call.backend.SourceAddresses(capacity, call.streams, call.like)
        self.call, self.capacity = call, capacity

    def with_source(self, count: int, source: Source) -> SourceTable:
        """A table whose first ``count`` sources are this one's, and ``source`` the next."""
        table = self if len(self.sources) == count else self._copy(count)
        table.sources.append(source)
        table.idents.append(source.ident)
        table.addresses.put(count, source)
        return table

    def _copy(self, count: int) -> SourceTable:
        copy = SourceTable(self.call, self.capacity)
        copy.sources, copy.idents = self.sources[:count], self.idents[:count]
        copy.addresses.copy_from(self.addresses, count)
        return copy


@dataclass(frozen=True)
class Prefetched:
    """Mixes of all completed sources for each of the reads to come."""

    reads: range
    sources: tuple[Source, ...]
    """One a read; its J streams are the targets' mixes and its logits their log-sum-exp."""


class Gradients:
    """What the calls of one forward pass tell each other in one backward pass."""

    def __init__(self, call: Pass) -> None:
        self.call = call
        self.records: list[tuple[int, Tensor, Tensor]] = []
        """Per read that ran: its index, the gradient of its output ``[N, D]``, and scalars ``[N, 3 J]``."""
        self.addresses = call.backend.IncomingAddresses(call.num_reads + 1, call.like)
        self.queries: Tensor | None = None
        self._saw: list[tuple[list[int], int]] = []
        self._of_partial: dict[int, list[int]] = {}
        self._chain = True
        """Every read so far saw all completed sources that an earlier one of these records saw, or fewer."""

    def record(
        self, read: int, gradient_ND: Tensor, scalars_N3J: Tensor, idents: list[int], count: int, partial: int
    ) -> None:
        index = len(self.records)
        if index:
            before, last = self._saw[-1]
            self._chain = self._chain and before is idents and count <= last
        self.records.append((read, gradient_ND, scalars_N3J))
        self.addresses.put(index, read, gradient_ND, scalars_N3J)
        self._saw.append((idents, count))
        if partial >= 0:
            self._of_partial.setdefault(partial, []).append(index)

    def of(self, ident: int, slot: int) -> tuple[Any, int, int]:
        """Addresses of records, the first that saw this source and how many did, side by side."""
        if slot < 0:
            found = self._of_partial.get(ident, [])
        elif not self._saw:
            found = []
        elif self._chain and self._saw[-1][1] > slot and self._saw[-1][0][slot] == ident:
            return self.addresses, 0, len(self.records)
        else:
            found = [i for i, (idents, count) in enumerate(self._saw) if slot < count and idents[slot] == ident]
        if found and found[-1] - found[0] + 1 != len(found):
            gathered = self.call.backend.IncomingAddresses(len(found), self.call.like)
            for index, record in enumerate(self.records[i] for i in found):
                gathered.put(index, *record)
            return gathered, 0, len(found)
        return self.addresses, found[0] if found else 0, len(found)


class Pass:
    """One forward pass: what all its calls share.

    Args:
        queries_JRD: R reads from ``first_choice`` on.
        like: a tensor ``[..., D]`` of the streams' shape and dtype.
        backend: a module of kernels, see `darlit.ops.cpu`.
    """

    def __init__(
        self,
        queries_JRD: Tensor,
        first_choice: int,
        key_streams: tuple[int, ...],
        value_streams: tuple[int, ...],
        streams: int,
        eps: float,
        like: Tensor,
        backend: Any,
    ) -> None:
        self.queries_JRD = queries_JRD.detach().float().contiguous()
        self.first_choice, self.num_reads = first_choice, queries_JRD.shape[1]
        self.key_streams, self.value_streams = backend.numbers(key_streams), backend.numbers(value_streams)
        self.values, self.targets = len(set(value_streams)), len(value_streams)
        self.streams, self.eps, self.backend = streams, eps, backend
        plain = like.is_contiguous() and like.shape[-2] > 1  # else any stride may stand where that of rows belongs
        self.like = like.detach() if plain else torch.empty_like(like, memory_format=torch.contiguous_format)
        self._float = torch.empty(0, device=like.device)
        self.width = like.shape[-1]
        self.tokens = like.numel() // self.width
        self.idents = itertools.count()
        self._given, self._version = queries_JRD.detach(), queries_JRD._version
        self._tasks: dict[int, Gradients] = {}

    def _forget(self, task: int) -> None:
        self._tasks.pop(task, None)

    def empty(self) -> Tensor:
        """A tensor of the streams' shape, contiguous."""
        return torch.empty_like(self.like)

    def floats(self, *shape: int) -> Tensor:
        return self._float.new_empty(shape)

    def queries_of(self, source: Source) -> Tensor:
        """The queries ``[J, R, D]`` of the reads that see this source; a view."""
        first = source.first_read - self.first_choice
        return self.queries_JRD[:, first : first + source.logits.shape[2]]

    def new_source(self, streams: Streams, first_read: int, reads: int, slot: int) -> Source:
        """A source whose logits, for reads from ``first_read`` on, are not computed yet."""
        source = Source(streams, first_read, next(self.idents), slot)
        source.logits = self.floats(self.tokens, self.targets, reads)
        source.scale = self.floats(self.tokens, self.streams)
        return source

    def gradients(self) -> Gradients:
        """Those of the backward pass that is running, gone when it ends.

        Raises:
            DarlitError: it is to be differentiated itself, or queries changed since the forward pass.
        """
        if torch.is_grad_enabled():
            raise DarlitError(SECOND_ORDER)
        if self._given._version != self._version:
            raise RuntimeError("a pathway's queries were changed in place between its forward and backward pass")
        task = torch._C._current_graph_task_id()
        found = self._tasks.get(task)
        if found is None:
            found = self._tasks[task] = Gradients(self)
            Variable._execution_engine.queue_callback(lambda: self._forget(task))
        return found


SECOND_ORDER = (
    "the fused pathway operators have no second derivatives (create_graph=True): choose implementation='reference'"
)


class _Queries(Function):
    """First of the chain, so last in the backward pass: passes the queries their complete gradient."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, queries: Tensor, call: Pass) -> Tensor:
        ctx.call, ctx.dtype = call, queries.dtype
        ctx.set_materialize_grads(False)
        return edge

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        gradients = ctx.call.gradients()
        total, gradients.queries = gradients.queries, None
        return None, None if total is None else total.to(ctx.dtype), None


class _Enter(Function):
    """Existing tensors become a source; with one stream ``second`` is None."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, first: Tensor, second: Tensor | None, call: Pass, source: Source) -> Tensor:
        if not source.rows:
            source.rows = tuple(dense(x) for x in (first, second) if x is not None)
            call.backend.stream_write(
                source.rows, None, None, None, call.queries_of(source), call.key_streams, call.eps, (), source.logits,
                source.scale,
            )  # fmt: skip
        ctx.save_for_backward(first, second, source.logits, source.scale)
        ctx.call, ctx.source, ctx.reads = call, (source.ident, source.slot), source.first_read
        ctx.set_materialize_grads(False)
        return edge

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        call: Pass = ctx.call
        first, second, logits, scale = ctx.saved_tensors
        gradients = call.gradients()
        incoming = gradients.of(*ctx.source)
        if not incoming[2]:
            return None, None, None, None, None
        given = (first,) if second is None else (first, second)
        results = tuple(call.empty() for _ in given)
        _write_backward(ctx, gradients, incoming, tuple(map(dense, given)), logits, scale, (), given, None, results)
        return None, results[0], None if second is None else results[1], None, None


class _Write(Function):
    """The streams after a branch's gated output, as a source."""

    @staticmethod
    def forward(
        ctx: Any,
        edge: Tensor,
        output: Tensor,
        first: Tensor | None,
        second: Tensor | None,
        rho: Tensor | None,
        beta: Tensor | None,
        call: Pass,
        source: Source,
    ) -> tuple[Tensor, ...]:
        carried = tuple(x for x in (first, second) if x is not None)
        written = tuple(call.empty() for _ in range(call.streams))
        source.rows = written
        call.backend.stream_write(
            tuple(map(dense, carried)), dense(output), gate(rho), gate(beta), call.queries_of(source), call.key_streams,
            call.eps, source.rows, source.logits, source.scale,
        )  # fmt: skip
        # What starts a block is beta times the output: the output itself need not be kept.
        ctx.save_for_backward(
            output if carried else None, first, second, rho, beta, source.logits, source.scale, *written
        )
        ctx.call, ctx.source, ctx.reads = call, (source.ident, source.slot), source.first_read
        ctx.set_materialize_grads(False)
        return (edge, *written)

    @staticmethod
    def backward(ctx: Any, _: Tensor, *arrived: Tensor | None) -> Any:
        call: Pass = ctx.call
        output, first, second, rho, beta, logits, scale, *written = ctx.saved_tensors
        gradients = call.gradients()
        incoming = gradients.of(*ctx.source)
        if not incoming[2] and all(gradient is None for gradient in arrived):
            return (None,) * 8
        carried = tuple(x for x in (first, second) if x is not None)
        results, output_gradient = tuple(call.empty() for _ in carried), call.empty()
        gates_NG = call.floats(call.tokens, call.streams + 1)
        _write_backward(
            ctx, gradients, incoming, written, logits, scale,
            tuple(None if x is None else dense(x) for x in arrived) if any(x is not None for x in arrived) else (),
            carried, output, results, output_gradient, rho, beta, gates_NG,
        )  # fmt: skip
        summed_G = gates_NG.sum(0) if rho is None or beta is None or rho.dim() == beta.dim() == 1 else None
        rho_gradient = beta_gradient = None
        if beta is not None:
            beta_gradient = _gate_part(beta, summed_G, gates_NG, slice(0, call.streams))
        if rho is not None:
            rho_gradient = _gate_part(rho, summed_G, gates_NG, slice(call.streams, None))
        first_gradient, second_gradient = (*results, None, None)[:2]
        return None, output_gradient, first_gradient, second_gradient, rho_gradient, beta_gradient, None, None


def _gate_part(values: Tensor, summed_G: Tensor | None, gates_NG: Tensor, part: slice) -> Tensor:
    if values.dim() == 1 and summed_G is not None:
        return summed_G[part].to(values.dtype)
    return gate_gradient(values, gates_NG[:, part])


def _write_backward(
    ctx: Any,
    gradients: Gradients,
    incoming: tuple[Any, int, int],
    written: Streams,
    logits: Tensor,
    scale: Tensor,
    arrived: tuple[Tensor | None, ...],
    carried: Streams,
    output: Tensor | None,
    carried_gradients: Streams,
    output_gradient: Tensor | None = None,
    rho: Tensor | None = None,
    beta: Tensor | None = None,
    gates_NG: Tensor | None = None,
) -> None:
    call: Pass = ctx.call
    first = ctx.reads - call.first_choice
    part = slice(first, first + logits.shape[2])
    queries_gradient = None
    if incoming[2]:
        if gradients.queries is None:
            gradients.queries = torch.zeros_like(call.queries_JRD)
        queries_gradient = gradients.queries[:, part]
    call.backend.stream_write_backward(
        written, logits, scale, arrived, incoming, ctx.reads, tuple(map(dense, carried)),
        None if output is None else dense(output), gate(rho), gate(beta), call.queries_JRD[:, part], call.key_streams,
        call.value_streams, carried_gradients,
        None if output_gradient is None else output_gradient, gates_NG, queries_gradient,
    )  # fmt: skip


class _Read(Function):
    """``x = sum_j share_j h_j``, ``h_j = sum_s softmax_s(logits_js) v^j_s``."""

    @staticmethod
    def forward(
        ctx: Any,
        edge: Tensor,
        shares: Tensor,
        call: Pass,
        table: SourceTable,
        count: int,
        partial: Source | None,
        read: int,
        prefetched: Source | None,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        out, lse_NJ, gates = call.empty(), call.floats(call.tokens, call.targets), gate(shares)
        sources = count + (partial is not None)
        # Mixes are made for one read and not kept for its backward pass: then the spreads have to be there.
        keep = training and (prefetched is not None or spreads_pay(sources, call.streams, call.targets))
        spreads = tuple(call.empty() for _ in range(call.targets - 1)) if keep else ()
        addresses, mixed = (table.addresses, count) if prefetched is None else (prefetched.addresses, 1)
        call.backend.depth_read(
            addresses, mixed, prefetched is not None, partial, read, call.streams, gates, call.value_streams,
            out, spreads, lse_NJ,
        )  # fmt: skip
        from_output = len(spreads) == call.targets - 1
        ctx.seen = ()
        if from_output:
            ctx.save_for_backward(shares, lse_NJ, out, *spreads)
        else:
            seen = [*table.sources[:count], *([] if partial is None else [partial])]
            ctx.seen = tuple(source.first_read for source in seen)
            tensors = [tensor for source in seen for tensor in (*source.rows, source.logits)]
            ctx.save_for_backward(shares, lse_NJ, *tensors)
        ctx.call, ctx.read = call, read
        ctx.saw = (table.idents, count, -1 if partial is None else partial.ident)
        ctx.set_materialize_grads(False)
        return edge, out

    @staticmethod
    def backward(ctx: Any, _: Tensor, gradient: Tensor | None) -> Any:
        call: Pass = ctx.call
        if gradient is None:
            return (None,) * 9
        gradients = call.gradients()
        shares, lse_NJ, *kept = ctx.saved_tensors
        seen = []
        step = call.streams + 1
        for index, first_read in enumerate(ctx.seen):
            source = Source((), first_read, -1, -1)
            *source.rows, source.logits = kept[step * index : step * (index + 1)]
            seen.append(source)
        gradient_ND, scalars_N3J = dense(gradient), call.floats(call.tokens, 3 * call.targets)
        call.backend.depth_read_backward(
            gradient_ND, None if seen else dense(kept[0]), () if seen else tuple(map(dense, kept[1:])), seen, ctx.read,
            lse_NJ, gate(shares), call.value_streams, scalars_N3J,
        )  # fmt: skip
        gradients.record(ctx.read, gradient_ND, scalars_N3J, *ctx.saw)
        needed = ctx.needs_input_grad[1]
        shares_gradient = gate_gradient(shares, scalars_N3J[:, 2 * call.targets :]) if needed else None
        return None, shares_gradient, None, None, None, None, None, None, None


def enter_queries(edge: Tensor, queries_JRD: Tensor, call: Pass) -> Tensor:
    """The edge of a chain whose calls train the queries."""
    return _Queries.apply(edge, queries_JRD, call)


def enter(edge: Tensor, source: Source, call: Pass) -> Tensor:
    """Make the streams of ``source``, which exist, a source of the chain; returns the edge."""
    streams = source.streams
    edge = _Enter.apply(edge, streams[0], streams[1] if len(streams) > 1 else None, call, source)
    source.trained = edge.requires_grad
    return edge


def write(
    edge: Tensor, carried: Streams, output: Tensor, rho: Tensor | None, beta: Tensor | None, source: Source, call: Pass
) -> Tensor:
    """Fill ``source`` with ``rho carried_m + (1 - rho) carried_{M-1-m} + beta_m output``; returns the edge.

    Args:
        carried: M tensors ``[B, T, D]``; none: the block is empty.
        rho: None (carry unchanged), ``[1]`` or ``[B, T, 1]``.
        beta: None (all ones), ``[M]`` or ``[B, T, M]``.
    """
    first, second = (*carried, None, None)[:2]
    edge, *streams = _Write.apply(edge, output, first, second, rho, beta, call, source)
    source.streams, source.trained = tuple(streams), edge.requires_grad
    return edge


def read(
    edge: Tensor,
    shares: Tensor,
    call: Pass,
    table: SourceTable,
    count: int,
    partial: Source | None,
    index: int,
    prefetched: Source | None,
) -> tuple[Tensor, Tensor]:
    """The edge and ``x [B, T, D]`` of the read ``index``; ``shares`` are ``[J]`` or ``[B, T, J]``, in sum one."""
    return _Read.apply(edge, shares, call, table, count, partial, index, prefetched, torch.is_grad_enabled())


def prefetch(call: Pass, table: SourceTable, count: int, reads: range) -> Prefetched:
    """Mix the completed sources for P reads at once, ``h_pj = sum_s softmax_s(logits_jps) v^j_s``.

    Each read then merges its mixes with the block that is being written by their log-sum-exp, as FlashAttention merges
    tiles. No gradient flows: a read records for its true sources.
    """
    like = call.like
    together = torch.empty((len(reads) * call.targets, *like.shape), dtype=like.dtype, device=like.device)
    mixes = together.unbind(0)  # in one tensor: a kernel needs no table of them
    lse_NJP = call.floats(call.tokens, call.targets, len(reads))
    call.backend.depth_prefetch(table.addresses, count, reads, call.streams, call.value_streams, mixes, lse_NJP)
    sources = []
    for index in range(len(reads)):
        source = Source((), reads.start, -1, -1)
        source.rows = tuple(mixes[index * call.targets : (index + 1) * call.targets])
        source.logits = lse_NJP
        source.addresses = call.backend.SourceAddresses(1, call.targets, call.like)
        source.addresses.put(0, source)
        sources.append(source)
    return Prefetched(reads, tuple(sources))
