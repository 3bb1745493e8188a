"""The C++ kernels behind the interface that `fused` expects of a backend.

Shapes: N tokens, D width, S sources of a read, M streams, J targets, R reads that see a source.
Streams, outputs and their gradients are ``[N, D]`` with any distance between rows; the rest is float32 and contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from darlit.ops.cpu_build import library
from darlit.ops.reference import SINKHORN_ITERATIONS

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def supports(device_type: str, dtype: torch.dtype) -> bool:
    """Whether tensors of this kind can be served here."""
    return device_type == "cpu" and dtype in DTYPES and library() is not None


def depth_read(
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    columns: Sequence[int],
    shares: Tensor,
    value_streams: Sequence[int],
    out: Tensor,
    spreads: Sequence[Tensor],
    lse_NJ: Tensor,
) -> None:
    """Fill ``out``, ``spreads`` (J - 1 of them, or none) and ``lse_NJ``.

    ``sources``: S * M, streams of one source side by side. ``logits``: S of ``[N, J, R_s]``; this read's is
    ``logits[s][..., columns[s]]``. ``shares``: ``[J]`` or ``[N, J]``.
    """
    targets = len(value_streams)
    count = len(logits)
    _call(
        "darlit_depth_read",
        *_shape(out),
        c_int(count),
        c_int(len(sources) // count),
        c_int(targets),
        _ints(value_streams),
        _rows(sources),
        *_logit_tables(logits, columns),
        _address(shares),
        c_int64(_token_stride(shares)),
        _rows([out]),
        _rows(spreads),
        _address(lse_NJ),
        c_int(torch.get_num_threads()),
    )


def depth_read_backward(
    gradient: Tensor,
    out: Tensor | None,
    spreads: Sequence[Tensor],
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    columns: Sequence[int],
    lse_NJ: Tensor,
    shares: Tensor,
    value_streams: Sequence[int],
    answer_N3J: Tensor,
) -> None:
    """Fill the answer: log-sum-exp, shares and ``<gradient, h_j>`` per target.

    From the output and its spreads or, where there is no ``out``, from the sources; these as in `depth_read`.
    """
    count = len(logits)
    _call(
        "darlit_depth_read_backward",
        *_shape(gradient),
        c_int(count),
        c_int(len(sources) // max(count, 1)),
        c_int(lse_NJ.shape[1]),
        _ints(value_streams),
        _rows([gradient]),
        _rows(sources),
        *_logit_tables(logits, columns),
        _rows([out]),
        _rows(spreads),
        _address(lse_NJ),
        _address(shares),
        c_int64(_token_stride(shares)),
        _address(answer_N3J),
        c_int(torch.get_num_threads()),
    )


def depth_mixes(
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    columns: Sequence[int],
    value_streams: Sequence[int],
    mixes: Sequence[Tensor],
    lse_NJP: Tensor,
) -> None:
    """Fill ``mixes``, P times J with those of a read side by side, and ``lse_NJP``.

    The rest as in `depth_read`; ``columns`` are those of the first of the P reads.
    """
    count = len(logits)
    _call(
        "darlit_depth_mixes",
        *_shape(sources[0]),
        c_int(count),
        c_int(len(sources) // count),
        *map(c_int, lse_NJP.shape[1:]),
        _ints(value_streams),
        _rows(sources),
        *_logit_tables(logits, columns),
        _rows(mixes),
        _address(lse_NJP),
        c_int(torch.get_num_threads()),
    )


def stream_write(
    carried: Sequence[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries_JRD: Tensor,
    key_streams: Sequence[int],
    eps: float,
    written: Sequence[Tensor],
    logits_NJR: Tensor,
    scale_NM: Tensor,
) -> None:
    """Fill ``written``, the logits and the key norms' scales.

    No ``output``: the streams are ``carried`` as it is, and ``written`` is empty.
    """
    _call(
        "darlit_stream_write",
        *_shape(carried[0] if output is None else output),
        c_int(scale_NM.shape[1]),
        c_int(logits_NJR.shape[1]),
        c_int(logits_NJR.shape[2]),
        _ints(key_streams),
        _rows(carried),
        _rows([output]),
        _address(rho),
        c_int64(_token_stride(rho)),
        _address(beta),
        c_int64(_token_stride(beta)),
        _address(queries_JRD),
        c_float(eps),
        _rows(written),
        _address(logits_NJR),
        _address(scale_NM),
        c_int(torch.get_num_threads()),
    )


def stream_write_backward(
    written: Sequence[Tensor],
    logits_NJR: Tensor,
    scale_NM: Tensor,
    written_gradients: Sequence[Tensor | None],
    answers: Sequence[tuple[int, Tensor, Tensor]],
    carried: Sequence[Tensor],
    output: Tensor | None,
    rho: Tensor | None,
    beta: Tensor | None,
    queries_JRD: Tensor,
    key_streams: Sequence[int],
    value_streams: Sequence[int],
    carried_gradients: Sequence[Tensor],
    output_gradient: Tensor | None,
    gates_gradient: Tensor | None,
    queries_gradient: Tensor,
) -> None:
    """Fill the gradients. ``answers``: (column, gradient of the read's output, its ``[N, 3J]``) of every read.

    ``gates_gradient`` ``[N, M + 1]``: one a beta, then rho.
    """
    count = len(answers)
    _call(
        "darlit_stream_write_backward",
        *_shape(written[0]),
        c_int(scale_NM.shape[1]),
        c_int(logits_NJR.shape[1]),
        c_int(logits_NJR.shape[2]),
        _ints(key_streams),
        _ints(value_streams),
        _rows(written),
        _address(logits_NJR),
        _address(scale_NM),
        _rows(written_gradients),
        c_int(count),
        _ints([column for column, _, _ in answers]),
        _rows([gradient for _, gradient, _ in answers]),
        (c_void_p * count)(*(scalars.data_ptr() for _, _, scalars in answers)),
        _rows(carried),
        _rows([output]),
        _address(rho),
        c_int64(_token_stride(rho)),
        _address(beta),
        c_int64(_token_stride(beta)),
        _address(queries_JRD),
        _rows(carried_gradients),
        _rows([output_gradient]),
        _address(gates_gradient),
        _address(queries_gradient),
        c_int(torch.get_num_threads()),
    )


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
    loaded = library()
    if loaded is None:
        raise RuntimeError("implementation='cpu' needs a C++ compiler: install g++, or choose reference")
    function = getattr(loaded, name)
    function.restype = None
    function(*arguments)


def _shape(x_ND: Tensor) -> tuple[c_int, c_int64, c_int]:
    """How every kernel begins: element type, N, D."""
    tokens, width = x_ND.shape
    return c_int(DTYPES[x_ND.dtype]), c_int64(tokens), c_int(width)


def _rows(tensors: Sequence[Tensor | None]) -> ctypes.Array[c_int64] | None:
    """Row address and distance of ``[N, D]`` tensors whose last dimension is contiguous; no tensors: a null pointer."""
    if not tensors:
        return None
    numbers = [number for x in tensors for number in ((0, 0) if x is None else (x.data_ptr(), x.stride(0)))]
    return (c_int64 * len(numbers))(*numbers)


def _logit_tables(logits: Sequence[Tensor], columns: Sequence[int]) -> tuple[ctypes.Array[c_int64], ...]:
    """Per source: the address of the read's column, the distance of tokens and that of targets."""
    array = c_int64 * len(logits)
    return (
        array(*(table.data_ptr() + 4 * column for table, column in zip(logits, columns, strict=True))),
        array(*(table.stride(0) for table in logits)),
        array(*(table.stride(1) for table in logits)),
    )


def _ints(values: Sequence[int]) -> ctypes.Array[c_int]:
    return (c_int * len(values))(*values)


def _address(x: Tensor | None) -> c_void_p:
    return c_void_p(None if x is None else x.data_ptr())


def _token_stride(gate: Tensor | None) -> int:
    """The distance between two tokens' values; 0 for a gate that all tokens share."""
    return 0 if gate is None or gate.dim() == 1 else gate.stride(0)
