"""The C++ kernels behind the interface that `darlit.ops.depth` and `darlit.ops.mixing` expect of a backend.

Shapes: N tokens, D width, S sources of a read, M streams, J targets, R reads that see a source.
Streams, outputs and their gradients are ``[N, D]`` with any distance between rows; the rest is float32 and contiguous.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from darlit.ops.cpu_build import library
from darlit.ops.reference import SINKHORN_ITERATIONS

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ELEMENTS_PER_THREAD = 1 << 14
"""Fewer are not worth another thread."""
KINDS = {"i": c_int, "l": c_int64, "p": c_void_p, "f": c_float}
ARGUMENTS = {
    "depth_read": "ili iiii ppppp i pl ppp i",
    "depth_read_backward": "ili iii pppp i ppp pl p i",
    "depth_prefetch": "ili iiii ppp i pp i",
    "stream_write": "ili iii ppp pl pl pl f ppp i",
    "stream_write_backward": "ili iii pp pppp ipi pp pp pl pl pl pppp i",
    "stream_mix": "ili ii p pl p i",
    "stream_mix_backward": "ili ii pp pl pp i",
    "vector_logits": "ili ii pp f pp i",
    "vector_logits_backward": "ili ii ppp pp pp p pl p i i",
    "stream_gates": "l iiii pppp i",
    "stream_gates_backward": "l iiii pppppp i",
}
"""Kinds of the arguments of every C function; most begin with element type, N and D."""


def supports(device_type: str, dtype: torch.dtype) -> bool:
    """Whether tensors of this kind can be served here."""
    return device_type == "cpu" and dtype in DTYPES and library() is not None


def numbers(values: Sequence[int]) -> Any:
    """A few small numbers as the kernels take them."""
    return (c_int * len(values))(*values)


class SourceAddresses:
    """Where the sources of a read lie: rows of every stream, and logits."""

    def __init__(self, capacity: int, streams: int, like: Tensor) -> None:
        del like
        self.streams = streams
        self.rows = (c_int64 * (2 * streams * capacity))()
        self.logits = (c_int64 * (3 * capacity))()

    def put(self, slot: int, source: Any) -> None:
        """Write down a source: its ``rows``, ``logits`` ``[N, J, R]`` and ``first_read``."""
        at = 2 * self.streams * slot
        for x in source.rows:
            self.rows[at], self.rows[at + 1] = x.data_ptr(), x.stride(-2)
            at += 2
        logits, at = source.logits, 3 * slot
        self.logits[at] = logits.data_ptr() - 4 * source.first_read
        self.logits[at + 1], self.logits[at + 2] = logits.stride(0), logits.stride(1)

    def copy_from(self, other: SourceAddresses, count: int) -> None:
        """Take over the first ``count`` sources."""
        ctypes.memmove(self.rows, other.rows, 16 * self.streams * count)
        ctypes.memmove(self.logits, other.logits, 24 * count)


class IncomingAddresses:
    """Where the records of reads lie: index of the read, gradient of its output, scalars ``[N, 3 J]``."""

    def __init__(self, capacity: int, like: Tensor) -> None:
        del like
        self._make(max(capacity, 1))

    def _make(self, capacity: int) -> None:
        self.capacity = capacity
        self.reads, self.rows = (c_int * capacity)(), (c_int64 * (2 * capacity))()
        self.scalars = (c_int64 * capacity)()

    def put(self, index: int, read: int, gradient_ND: Tensor, scalars_N3J: Tensor) -> None:
        """Write down a record as number ``index``."""
        if index == self.capacity:  # some reads were called twice
            old: list[Any] = [self.reads, self.rows, self.scalars]
            self._make(2 * index)
            new: list[Any] = [self.reads, self.rows, self.scalars]
            for to, kept in zip(new, old, strict=True):
                ctypes.memmove(to, kept, ctypes.sizeof(kept))
        self.reads[index] = read
        self.rows[2 * index], self.rows[2 * index + 1] = gradient_ND.data_ptr(), gradient_ND.stride(-2)
        self.scalars[index] = scalars_N3J.data_ptr()


def depth_read(
    addresses: SourceAddresses,
    count: int,
    merged: bool,
    partial: Any,
    read: int,
    streams: int,
    shares: Tensor,
    value_streams: Any,
    out: Tensor,
    spreads: Sequence[Tensor],
    lse_NJ: Tensor,
) -> None:
    """Fill ``out``, ``spreads`` (J - 1 of them, or none) and ``lse_NJ``.

    Args:
        addresses: of ``count`` completed sources; ``merged``: of mixes, which have a stream for each target.
        partial: one more source, or None.
        read: index of the read.
        streams: M of the sources that are no mixes.
        shares: ``[J]`` or ``[N, J]``.
        value_streams: per target, the stream of its values; see `numbers`.
    """
    rows, logits = (None, None) if partial is None else _single(partial, streams)
    _function("depth_read")(
        *_head(out), count, merged, streams, len(value_streams), value_streams, addresses.rows, addresses.logits,
        rows, logits, read, shares.data_ptr(), _token_stride(shares), _rows([out]), _rows(spreads), lse_NJ.data_ptr(),
        _threads(out),
    )  # fmt: skip


def depth_read_backward(
    gradient: Tensor,
    out: Tensor | None,
    spreads: Sequence[Tensor],
    sources: Sequence[Any],
    read: int,
    lse_NJ: Tensor,
    shares: Tensor,
    value_streams: Any,
    scalars_N3J: Tensor,
) -> None:
    """Fill the scalars of a record: log-sum-exp, shares and ``<gradient, h_j>`` per target.

    From the output and its spreads or, where there is no ``out``, from the sources.
    """
    streams = len(sources[0].rows) if sources else 0
    addresses = SourceAddresses(len(sources), streams, gradient)
    for slot, source in enumerate(sources):
        addresses.put(slot, source)
    _function("depth_read_backward")(
        *_head(gradient), len(sources), streams, len(value_streams), value_streams, _rows([gradient]), addresses.rows,
        addresses.logits, read, _rows([out]), _rows(spreads), lse_NJ.data_ptr(), shares.data_ptr(),
        _token_stride(shares), scalars_N3J.data_ptr(), _threads(gradient),
    )  # fmt: skip


def depth_prefetch(
    addresses: SourceAddresses,
    count: int,
    reads: range,
    streams: int,
    value_streams: Any,
    mixes: Sequence[Tensor],
    lse_NJP: Tensor,
) -> None:
    """Fill ``mixes``, P times J with those of a read side by side, and ``lse_NJP``; the rest as in `depth_read`."""
    _function("depth_prefetch")(
        *_head(mixes[0]), count, streams, len(value_streams), len(reads), value_streams, addresses.rows,
        addresses.logits, reads.start, _rows(mixes), lse_NJP.data_ptr(), _threads(mixes[0]),
    )  # fmt: skip


def stream_write(
    carried: Sequence[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries_JRD: Tensor,
    key_streams: Any,
    eps: float,
    written: Sequence[Tensor],
    logits_NJR: Tensor,
    scale_NM: Tensor,
) -> None:
    """Fill ``written``, the logits and the key norms' scales.

    No ``output``: the streams are ``carried`` as it is, and ``written`` is empty. ``queries_JRD``: any distance
    between targets.
    """
    like = carried[0] if output is None else output
    _function("stream_write")(
        *_head(like), scale_NM.shape[1], *logits_NJR.shape[1:], key_streams, _rows(carried), _rows([output]),
        _pointer(rho), _token_stride(rho), _pointer(beta), _token_stride(beta), queries_JRD.data_ptr(),
        queries_JRD.stride(0), eps, _rows(written), logits_NJR.data_ptr(), scale_NM.data_ptr(), _threads(like),
    )  # fmt: skip


def stream_write_backward(
    written: Sequence[Tensor],
    logits_NJR: Tensor,
    scale_NM: Tensor,
    arrived: Sequence[Tensor | None],
    incoming: tuple[IncomingAddresses, int, int],
    first_read: int,
    carried: Sequence[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries_JRD: Tensor,
    key_streams: Any,
    value_streams: Any,
    carried_gradients: Sequence[Tensor],
    output_gradient: Tensor | None,
    gates_gradient: Tensor | None,
    queries_gradient: Tensor | None,
) -> None:
    """Fill the gradients; add to those of the queries.

    Args:
        arrived: gradients of ``written`` from later writes; empty: none.
        incoming: records, the first that counts and how many do.
        first_read: index of the read that the first column of the logits belongs to.
        output: None where nothing was carried: it is ``written / beta``.
        gates_gradient: ``[N, M + 1]``, one a beta, then rho.
        queries_gradient: laid out like the queries; None: not wanted.
    """
    addresses, first, count = incoming
    starts = [ctypes.addressof(x) for x in (addresses.reads, addresses.rows, addresses.scalars)]
    reads, gradients, scalars = (start + size * first for start, size in zip(starts, (4, 16, 8), strict=True))
    _function("stream_write_backward")(
        *_head(written[0]), scale_NM.shape[1], *logits_NJR.shape[1:], key_streams, value_streams, _rows(written),
        logits_NJR.data_ptr(), scale_NM.data_ptr(), _rows(arrived), count, reads, first_read, gradients, scalars,
        _rows(carried), _rows([output]), _pointer(rho), _token_stride(rho), _pointer(beta), _token_stride(beta),
        queries_JRD.data_ptr(), queries_JRD.stride(0), _rows(carried_gradients), _rows([output_gradient]),
        _pointer(gates_gradient), _pointer(queries_gradient), _threads(written[0]),
    )  # fmt: skip


def stream_mix(sources: Sequence[Tensor], coefficients: Tensor, mixed: Sequence[Tensor]) -> None:
    """Fill O ``mixed`` from S ``sources``. ``coefficients``: ``[O S]`` or ``[N, O S]``."""
    _call(
        "darlit_stream_mix",
        *_shape(sources[0]),
        c_int(len(mixed)),
        c_int(len(sources)),
        _rows(sources),
        _address(coefficients),
        c_int64(_token_stride(coefficients)),
        _rows(mixed),
        c_int(torch.get_num_threads()),
    )


def stream_mix_backward(
    gradients: Sequence[Tensor],
    sources: Sequence[Tensor],
    coefficients: Tensor,
    source_gradients: Sequence[Tensor],
    coefficients_gradient: Tensor,
) -> None:
    """Fill the gradients; that of the coefficients is ``[N, O S]`` whether tokens share them or not.

    No ``source_gradients``: that of the coefficients alone.
    """
    _call(
        "darlit_stream_mix_backward",
        *_shape(sources[0]),
        c_int(len(gradients)),
        c_int(len(sources)),
        _rows(gradients),
        _rows(sources),
        _address(coefficients),
        c_int64(_token_stride(coefficients)),
        _rows(source_gradients),
        _address(coefficients_gradient),
        c_int(torch.get_num_threads()),
    )


def vector_logits(streams: Sequence[Tensor], weights_CMD: Tensor, eps: float, logits: Tensor, scale: Tensor) -> None:
    """Fill the logits ``[G, N, C]`` and the scales ``[G, N]`` of G groups of M streams, each with its own norm."""
    for group, first in enumerate(range(0, len(streams), weights_CMD.shape[1])):
        _call(
            "darlit_vector_logits",
            *_shape(streams[0]),
            c_int(weights_CMD.shape[1]),
            c_int(len(weights_CMD)),
            _rows(streams[first : first + weights_CMD.shape[1]]),
            _address(weights_CMD),
            c_float(eps),
            _group(logits, group, streams),
            _group(scale, group, streams, of_token=1),
            c_int(torch.get_num_threads()),
        )


def vector_logits_backward(
    gradient: Tensor,
    logits: Tensor,
    scale: Tensor,
    streams: Sequence[Tensor],
    weights_CMD: Tensor,
    stream_gradients: Sequence[Tensor],
    weights_gradient: Tensor,
    arrived: Sequence[Tensor] = (),
    coefficients: Tensor | None = None,
    mixed_gradient: Tensor | None = None,
) -> None:
    """Fill the gradients of streams and weights.

    Gradients of the streams from elsewhere are added in the same pass: ``arrived``, one a stream, and ``coefficients``
    ``[N, G M]`` times ``mixed_gradient``, that of a mixture of the streams. ``stream_gradients`` may be ``arrived``.
    """
    together = weights_CMD.shape[1]
    for group, first in enumerate(range(0, len(streams), together)):
        _call(
            "darlit_vector_logits_backward",
            *_shape(streams[0]),
            c_int(together),
            c_int(len(weights_CMD)),
            _group(gradient, group, streams),
            _group(logits, group, streams),
            _group(scale, group, streams, of_token=1),
            _rows(streams[first : first + together]),
            _address(weights_CMD),
            _rows(stream_gradients[first : first + together]),
            _address(weights_gradient),
            _rows(arrived[first : first + together]),
            c_void_p(None if coefficients is None else coefficients.data_ptr() + 4 * first),
            c_int64(len(streams)),
            _rows([mixed_gradient]),
            c_int(group),
            c_int(torch.get_num_threads()),
        )


def stream_gates(logits: Tensor, parameters: Tensor, family: str, pre_NM: Tensor, write: Tensor) -> None:
    """Fill the coefficients ``pre [N, n]`` and ``write [N, n (n + 1)]``; see `darlit.ops.reference.stream_gates`."""
    _call(
        "darlit_stream_gates",
        *_gates_shape(pre_NM, logits, family),
        _address(logits),
        _address(parameters),
        _address(pre_NM),
        _address(write),
        c_int(torch.get_num_threads()),
    )


def stream_gates_backward(
    pre_gradient: Tensor,
    write_gradient: Tensor,
    logits: Tensor,
    parameters: Tensor,
    family: str,
    logits_gradient: Tensor,
    parameters_gradient: Tensor,
) -> None:
    """Fill the gradients of logits and parameters; the coefficients are computed again."""
    _call(
        "darlit_stream_gates_backward",
        *_gates_shape(pre_gradient, logits, family),
        _address(pre_gradient),
        _address(write_gradient),
        _address(logits),
        _address(parameters),
        _address(logits_gradient),
        _address(parameters_gradient),
        c_int(torch.get_num_threads()),
    )


def _gates_shape(pre_NM: Tensor, logits: Tensor, family: str) -> tuple[c_int64, c_int, c_int, c_int, c_int]:
    tokens, streams = pre_NM.shape
    return (
        c_int64(tokens),
        c_int(streams),
        c_int(logits.shape[-1]),
        c_int(family == "hc"),
        c_int(SINKHORN_ITERATIONS),
    )


def _group(table: Tensor, group: int, streams: Sequence[Tensor], of_token: int | None = None) -> c_void_p:
    """Address of one group's part of ``[G, N, C]``, or of ``[G, N]`` with one number a token."""
    numbers = len(streams[0]) * (table.shape[-1] if of_token is None else of_token)
    return c_void_p(table.data_ptr() + 4 * group * numbers)


def _call(name: str, *arguments: object) -> None:
    _function(name.removeprefix("darlit_"))(*arguments)


@functools.cache
def _function(name: str) -> Any:
    loaded = library()
    if loaded is None:
        raise RuntimeError("implementation='cpu' needs a C++ compiler: install g++, or choose reference")
    function = getattr(loaded, f"darlit_{name}")
    function.restype = None
    function.argtypes = [KINDS[kind] for kind in ARGUMENTS[name].replace(" ", "")]
    return function


def _head(x_ND: Tensor) -> tuple[int, int, int]:
    """How every kernel begins: element type, N, D."""
    width = x_ND.shape[-1]
    return DTYPES[x_ND.dtype], x_ND.numel() // width, width


def _threads(x_ND: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + x_ND.numel() // ELEMENTS_PER_THREAD)


def _single(source: Any, streams: int) -> tuple[Any, Any]:
    """Addresses of one source that is in no table."""
    if source.addresses is None:
        source.addresses = SourceAddresses(1, streams, source.logits)
        source.addresses.put(0, source)
    return source.addresses.rows, source.addresses.logits


def _shape(x_ND: Tensor) -> tuple[c_int, c_int64, c_int]:
    """How every kernel begins: element type, N, D."""
    tokens, width = x_ND.shape
    return c_int(DTYPES[x_ND.dtype]), c_int64(tokens), c_int(width)


def _rows(tensors: Sequence[Tensor | None]) -> ctypes.Array[c_int64] | None:
    """Row address and distance of ``[N, D]`` tensors whose last dimension is contiguous; no tensors: a null pointer."""
    if not tensors:
        return None
    numbers = [number for x in tensors for number in ((0, 0) if x is None else (x.data_ptr(), x.stride(-2)))]
    return (c_int64 * len(numbers))(*numbers)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _address(x: Tensor | None) -> c_void_p:
    return c_void_p(None if x is None else x.data_ptr())


def _token_stride(gate: Tensor | None) -> int:
    """The distance between two tokens' values; 0 for a gate that all tokens share."""
    return 0 if gate is None or gate.dim() == 1 else gate.stride(0)
