# mypy: disable-error-code="no-untyped-def"
"""The first phase of Block reads for a GPU; see `darlit.ops.cpu.depth_prefetch` for the arguments.

No sum runs over the width, so a program owns a part of one token's channels and has the sums of up to `MOST_READS`
reads in registers: each row of a source is loaded once for all of these reads. One target a program; programs of a
token's targets run side by side, and find a row of a stream that they share in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.triton_rows import aligned, bits, check_width, pointers
from darlit.ops.triton_tables import SourceAddresses

MOST_READS = 16
"""More are served by several programs, each of which reads the sources."""


@triton.jit(do_not_specialize=["sources", "first_read", "reads"], do_not_specialize_on_alignment=["lse", "mixes"])
def depth_prefetch_kernel(
    table,  # of the completed sources, see `triton_tables`
    mixes,  # P * J contiguous tensors, those of a read side by side, in one
    lse,
    sources,
    first_read,
    width,
    reads,
    M: tl.constexpr,
    J: tl.constexpr,
    VALUES: tl.constexpr,
    ALIGNED: tl.constexpr,
    READS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mixes of READS reads: first the log-sum-exp from the logits alone, then one pass over the rows."""
    dtype: tl.constexpr = mixes.dtype.element_ty
    tokens = tl.num_programs(0) // J
    token = (tl.program_id(0) // J).to(tl.int64)
    target = tl.program_id(0) % J
    read_P = tl.program_id(2) * READS + tl.arange(0, READS)
    in_reads_P = read_P < reads
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_width_D = column_D < width

    top_P = tl.full([READS], float("-inf"), tl.float32)
    total_P = tl.zeros([READS], tl.float32)
    for s in range(sources):
        source = table + s * (2 * M + 3)
        address = tl.load(source + 2 * M).to(tl.pointer_type(tl.float32)) + first_read
        address += token * tl.load(source + 2 * M + 1) + target * tl.load(source + 2 * M + 2)
        logit_P = tl.load(address + read_P, mask=in_reads_P, other=0.0)
        new_top_P = tl.maximum(top_P, logit_P)
        total_P = total_P * tl.exp(top_P - new_top_P) + tl.exp(logit_P - new_top_P)
        top_P = new_top_P
    lse_P = top_P + tl.log(total_P)
    tl.store(lse + (token * J + target) * reads + read_P, lse_P, mask=in_reads_P)

    mixed_PD = tl.zeros([READS, BLOCK], tl.float32)
    for s in range(sources):
        source = table + s * (2 * M + 3)
        address = tl.load(source + 2 * M).to(tl.pointer_type(tl.float32)) + first_read
        address += token * tl.load(source + 2 * M + 1) + target * tl.load(source + 2 * M + 2)
        weight_P = tl.exp(tl.load(address + read_P, mask=in_reads_P, other=0.0) - lse_P)
        stream = source + 2 * ((VALUES >> target) & 1)
        row = pointers(tl.load(stream), tl.load(stream + 1), token, dtype, ALIGNED)
        value_D = tl.load(row + column_D, mask=in_width_D, other=0.0).to(tl.float32)
        mixed_PD += weight_P[:, None] * value_D[None, :]
    entry_P = (tl.minimum(read_P, reads - 1) * J + target).to(tl.int64)
    row_P = pointers(mixes.to(tl.int64), width, entry_P * tokens + token, dtype, ALIGNED)
    mask_PD = in_reads_P[:, None] & in_width_D[None, :]
    tl.store(row_P[:, None] + column_D[None, :], mixed_PD.to(dtype), mask=mask_PD)


def mixes_tile(width: int, reads: int) -> tuple[int, int, int]:
    """READS and BLOCK of a program, and its warps: at most 64 sums a thread, of four channels side by side or more."""
    together = min(MOST_READS, triton.next_power_of_2(reads))
    block = min(triton.next_power_of_2(width), 8192 // together)
    return together, block, max(1, min(8, block // 128))


def depth_prefetch(
    addresses: SourceAddresses,
    count: int,
    reads: range,
    streams: int,
    value_streams: Sequence[int],
    mixes: Sequence[Tensor],
    lse_NJP: Tensor,
) -> None:
    """See `darlit.ops.cpu.depth_prefetch`."""
    width = mixes[0].shape[-1]
    tokens, targets, number = lse_NJP.shape
    check_width(width)
    together, block, warps = mixes_tile(width, number)
    grid = (tokens * targets, triton.cdiv(width, block), triton.cdiv(number, together))
    depth_prefetch_kernel[grid](
        addresses.table,
        mixes[0],
        lse_NJP,
        count,
        reads.start,
        width,
        number,
        M=streams,
        J=targets,
        VALUES=bits(value_streams),
        ALIGNED=addresses.aligned and aligned([mixes[0]]),
        READS=together,
        BLOCK=block,
        num_warps=warps,
    )
