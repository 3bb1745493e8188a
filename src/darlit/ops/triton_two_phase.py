# mypy: disable-error-code="no-untyped-def"
"""The first phase of Block reads for a GPU; see `darlit.ops.cpu.depth_mixes` for the arguments.

No sum runs over the width, so a program owns a part of one token's channels and has the sums of up to `MOST_READS`
reads in registers: each row of a source is loaded once for all of these reads. One target a program; programs of a
token's targets run side by side, and find a row of a stream that they share in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from darlit.ops.triton_forward import logit_tables
from darlit.ops.triton_rows import addresses, aligned, bits, check_width, row_of

MOST_READS = 16
"""More are served by several programs, each of which reads the sources."""


@triton.jit
def depth_mixes_kernel(
    table,  # S * M sources, then P * J mixes, those of a read side by side
    logits,  # S times: address of the first read's column, token distance, target distance
    lse,
    kind,  # one element of the streams' dtype
    sources,
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
    dtype: tl.constexpr = kind.dtype.element_ty
    token = (tl.program_id(0) // J).to(tl.int64)
    target = tl.program_id(0) % J
    read_P = tl.program_id(2) * READS + tl.arange(0, READS)
    in_reads_P = read_P < reads
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_width_D = column_D < width

    top_P = tl.full([READS], float("-inf"), tl.float32)
    total_P = tl.zeros([READS], tl.float32)
    for s in range(sources):
        address = tl.load(logits + 3 * s).to(tl.pointer_type(tl.float32))
        address += token * tl.load(logits + 3 * s + 1) + target * tl.load(logits + 3 * s + 2)
        logit_P = tl.load(address + read_P, mask=in_reads_P, other=0.0)
        new_top_P = tl.maximum(top_P, logit_P)
        total_P = total_P * tl.exp(top_P - new_top_P) + tl.exp(logit_P - new_top_P)
        top_P = new_top_P
    lse_P = top_P + tl.log(total_P)
    tl.store(lse + (token * J + target) * reads + read_P, lse_P, mask=in_reads_P)

    mixed_PD = tl.zeros([READS, BLOCK], tl.float32)
    for s in range(sources):
        address = tl.load(logits + 3 * s).to(tl.pointer_type(tl.float32))
        address += token * tl.load(logits + 3 * s + 1) + target * tl.load(logits + 3 * s + 2)
        weight_P = tl.exp(tl.load(address + read_P, mask=in_reads_P, other=0.0) - lse_P)
        row = row_of(table, s * M + ((VALUES >> target) & 1), token, dtype, ALIGNED)
        value_D = tl.load(row + column_D, mask=in_width_D, other=0.0).to(tl.float32)
        mixed_PD += weight_P[:, None] * value_D[None, :]
    entry_P = sources * M + tl.minimum(read_P, reads - 1) * J + target
    row_P = row_of(table, entry_P, token, dtype, ALIGNED)
    mask_PD = in_reads_P[:, None] & in_width_D[None, :]
    tl.store(row_P[:, None] + column_D[None, :], mixed_PD.to(dtype), mask=mask_PD)


def mixes_tile(width: int, reads: int) -> tuple[int, int, int]:
    """READS and BLOCK of a program, and its warps: at most 64 sums a thread, of four channels side by side or more."""
    together = min(MOST_READS, triton.next_power_of_2(reads))
    block = min(triton.next_power_of_2(width), 8192 // together)
    return together, block, max(1, min(8, block // 128))


def depth_mixes(
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    columns: Sequence[int],
    value_streams: Sequence[int],
    mixes: Sequence[Tensor],
    lse_NJP: Tensor,
) -> None:
    """See `darlit.ops.cpu.depth_mixes`."""
    tokens, width = sources[0].shape
    check_width(width)
    _, targets, reads = lse_NJP.shape
    together, block, warps = mixes_tile(width, reads)
    tensors = [*sources, *mixes]
    grid = (tokens * targets, triton.cdiv(width, block), triton.cdiv(reads, together))
    depth_mixes_kernel[grid](
        addresses(tensors, sources[0]),
        logit_tables(logits, columns),
        lse_NJP,
        sources[0],
        len(logits),
        width,
        reads,
        M=len(sources) // len(logits),
        J=targets,
        VALUES=bits(value_streams),
        ALIGNED=aligned(tensors),
        READS=together,
        BLOCK=block,
        num_warps=warps,
    )
