"""The kernels for a GPU behind the interface that `depth` and `streams` expect; see `cpu` for the arguments.

A program owns TOKENS whole rows, so every sum over the width stays in registers and each stream is read once. Sources
are reached through a table of addresses and looped over, so one compiled kernel serves a history of any length. All
arithmetic is float32. Query rows are small, shared by all programs and served by the L2 cache; the queries' own
gradient is a matrix product of the logits' gradients, left to the BLAS.

Shapes: N tokens, D width, S sources of a read, M streams, J targets, R reads that see a source.
``KEYS`` and ``VALUES`` hold per target, one bit each, the stream of its keys and of its values.
"""

from __future__ import annotations

import os

import torch

from darlit.ops.triton_backward import depth_read_backward, stream_write_backward
from darlit.ops.triton_forward import depth_read, stream_write
from darlit.ops.triton_gates import stream_gates, stream_gates_backward
from darlit.ops.triton_logits import vector_logits, vector_logits_backward
from darlit.ops.triton_mix import stream_mix, stream_mix_backward
from darlit.ops.triton_prefetch import depth_prefetch
from darlit.ops.triton_tables import IncomingAddresses, SourceAddresses, numbers

__all__ = [
    "IncomingAddresses",
    "SourceAddresses",
    "depth_prefetch",
    "depth_read",
    "depth_read_backward",
    "numbers",
    "stream_gates",
    "stream_gates_backward",
    "stream_mix",
    "stream_mix_backward",
    "stream_write",
    "stream_write_backward",
    "supports",
    "vector_logits",
    "vector_logits_backward",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(device_type: str, dtype: torch.dtype) -> bool:
    """Whether tensors of this kind can be served here; on a CPU in Triton's interpreter only."""
    interpreted = device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (device_type == "cuda" or interpreted) and dtype in DTYPES
