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
    tokens, width = out.shape
    targets = len(value_streams)
    count = len(logits)
    _call(
        "darlit_depth_read",
        c_int(DTYPES[out.dtype]),
        c_int64(tokens),
        c_int(width),
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
    tokens, width = gradient.shape
    count = len(logits)
    _call(
        "darlit_depth_read_backward",
        c_int(DTYPES[gradient.dtype]),
        c_int64(tokens),
        c_int(width),
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
    tokens, width = (carried[0] if output is None else output).shape
    _call(
        "darlit_stream_write",
        c_int(DTYPES[(carried[0] if output is None else output).dtype]),
        c_int64(tokens),
        c_int(width),
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
    tokens, width = written[0].shape
    count = len(answers)
    _call(
        "darlit_stream_write_backward",
        c_int(DTYPES[written[0].dtype]),
        c_int64(tokens),
        c_int(width),
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


def _call(name: str, *arguments: object) -> None:
    loaded = library()
    if loaded is None:
        raise RuntimeError("implementation='cpu' needs a C++ compiler: install g++, or choose reference")
    function = getattr(loaded, name)
    function.restype = None
    function(*arguments)


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
