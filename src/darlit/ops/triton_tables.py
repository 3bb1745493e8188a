# mypy: disable-error-code="no-untyped-def"
"""Tables of addresses on the device, for a whole pass: a source or record adds its few numbers once.

The kernel that stores them takes the tensors themselves, so nothing is copied from the host and a CUDA graph can
capture it. A source's row: address and row distance of every stream, then address, token and target distance of its
logits. A record's row: index of the read, address and row distance of the gradient, address of its scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.triton_rows import aligned

RECORD = 4
"""Numbers of a record."""


@triton.jit(
    do_not_specialize=["slot", "strides", "token", "target", "first_read"],
    do_not_specialize_on_alignment=["tensors", "logits"],
)
def store_source_kernel(table, slot, tensors, strides, logits, token, target, first_read, M: tl.constexpr):
    row = table + slot * (2 * M + 3)
    for m in tl.static_range(M):
        tl.store(row + 2 * m, tensors[m].to(tl.int64))
        tl.store(row + 2 * m + 1, strides[m])
    tl.store(row + 2 * M, logits.to(tl.int64) - 4 * first_read)
    tl.store(row + 2 * M + 1, token)
    tl.store(row + 2 * M + 2, target)


@triton.jit(do_not_specialize=["slot", "read", "stride"], do_not_specialize_on_alignment=["gradient", "scalars"])
def store_record_kernel(table, slot, read, gradient, stride, scalars):
    row = table + slot * 4
    tl.store(row, read.to(tl.int64))
    tl.store(row + 1, gradient.to(tl.int64))
    tl.store(row + 2, stride)
    tl.store(row + 3, scalars.to(tl.int64))


class SourceAddresses:
    """See `darlit.ops.cpu.SourceAddresses`."""

    def __init__(self, capacity: int, streams: int, like: Tensor) -> None:
        self.streams, self.aligned = streams, True
        self.table = torch.empty(capacity, 2 * streams + 3, dtype=torch.int64, device=like.device)

    def put(self, slot: int, source: Any) -> None:
        tensors, logits = tuple(source.rows), source.logits
        self.aligned = self.aligned and aligned(tensors)
        strides = tuple(x.stride(-2) for x in tensors)
        store_source_kernel[(1,)](
            self.table, slot, tensors, strides, logits, logits.stride(0), logits.stride(1), source.first_read,
            M=self.streams,
        )  # fmt: skip

    def copy_from(self, other: SourceAddresses, count: int) -> None:
        self.aligned = other.aligned
        self.table[:count].copy_(other.table[:count])


class IncomingAddresses:
    """See `darlit.ops.cpu.IncomingAddresses`."""

    def __init__(self, capacity: int, like: Tensor) -> None:
        self.table = torch.empty(max(capacity, 1), RECORD, dtype=torch.int64, device=like.device)
        self.reads: list[int] = []
        self.aligned = True

    def put(self, index: int, read: int, gradient_ND: Tensor, scalars_N3J: Tensor) -> None:
        if index == len(self.table):  # some reads were called twice
            self.table = torch.cat([self.table, torch.empty_like(self.table)])
        self.reads.append(read)
        self.aligned = self.aligned and aligned([gradient_ND])
        store_record_kernel[(1,)](self.table, index, read, gradient_ND, gradient_ND.stride(-2), scalars_N3J)


def numbers(values: Sequence[int]) -> tuple[int, ...]:
    """A few small numbers as the launchers take them."""
    return tuple(values)
