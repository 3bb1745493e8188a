"""A backend without kernels: with fake tensors, the calls' bookkeeping alone, whose memory is to be counted."""

from __future__ import annotations

from typing import Any


class SourceAddresses:
    """Of nothing."""

    def __init__(self, *_: Any) -> None: ...
    def put(self, *_: Any) -> None: ...
    def copy_from(self, *_: Any) -> None: ...


IncomingAddresses = SourceAddresses
numbers = tuple


def _nothing(*_: Any) -> None: ...


depth_read = depth_read_backward = depth_prefetch = stream_write = stream_write_backward = _nothing
stream_mix = stream_mix_backward = vector_logits = vector_logits_backward = _nothing
stream_gates = stream_gates_backward = _nothing
