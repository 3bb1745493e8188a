"""Compile the Triton kernels for chips that are not here, and count what they load, store and spill."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from darlit.ops import triton_backward, triton_forward, triton_rows, triton_prefetch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MODULES = (triton_forward, triton_backward, triton_prefetch)
STREAM_BYTES = {"bf16": 2, "fp32": 4}

# DAR's case of every kernel: two streams, two targets, keys from the opposite stream, static gates, all gradients.
ROUTE = {"M": 2, "J": 2}
GATES = {"CARRIED": True, "OUTPUT": True, "RHO": True, "BETA": True}
KERNELS = {
    "depth_read_kernel": {**ROUTE, "VALUES": 1 << 8, "SPREADS": True},
    "depth_read_backward_kernel": {"J": 2},
    "depth_read_backward_from_sources_kernel": {**ROUTE, "VALUES": 0b10},
    "depth_mixes_kernel": {**ROUTE, "VALUES": 0b10},
    "stream_write_kernel": {**ROUTE, **GATES, "KEYS": 0b01},
    "stream_write_backward_kernel": {**ROUTE, **GATES, "KEYS": 0b01, "VALUES": 0b10, "ARRIVED": 0b11},
}
# Rows of a stream that must move in one pass of every loop: one source or answer, one read to come.
STREAM_ROWS = {
    "depth_read_kernel": 2 + 1 + 1,  # a source's two streams; x, the spread
    "depth_read_backward_kernel": 3,  # the gradient, x, the spread
    "depth_read_backward_from_sources_kernel": 1 + 2,  # the gradient; a source's two streams
    "depth_mixes_kernel": 1,  # a source's stream; the mixes, which depend on the bucket of reads, are added
    "stream_write_kernel": 2 + 1 + 2,  # carried, the output; written
    "stream_write_backward_kernel": 2 + 2 + 1 + 2 + 1 + 2 + 1,  # x, dx, answer, carried, y; their gradients
}
QUERY_ROWS = {
    "depth_read_kernel": 0,
    "depth_read_backward_kernel": 0,
    "depth_read_backward_from_sources_kernel": 0,
    "depth_mixes_kernel": 0,
    "stream_write_kernel": 2,
    "stream_write_backward_kernel": 2,
}
NUMBERS = ("sources", "tokens", "width", "shares_row", "reads", "rho_row", "beta_row", "answered")


@dataclass(frozen=True)
class Compiled:
    spills: int
    moved: int
    """Bytes that a program's global loads and stores of more than a scalar move, each loop run once."""
    floor: int


def compile_kernel(name: str, target: str, width: int, dtype: str, aligned: bool = True, reads: int = 2) -> Compiled:
    """``reads``: how many `depth_mixes_kernel` serves."""
    kernel = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    rows = STREAM_ROWS[name]
    if name == "depth_mixes_kernel":
        together, block, warps = triton_prefetch.mixes_tile(width, reads)
        tokens, rows, tiling = 1, rows + together, {"READS": together}
    else:
        tokens, block, warps = triton_rows.tile(width)
        tiling = {"TOKENS": tokens}
    constants = {**KERNELS[name], **tiling, "ALIGNED": aligned, "BLOCK": block}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("table", "answers") or (argument == "logits" and name.startswith("depth_")):
            signature[argument] = "*i64"
        elif argument in NUMBERS:
            signature[argument] = "i32"
        else:
            signature[argument] = {"kind": f"*{dtype}", "eps": "fp32"}.get(argument, "*fp32")
    divisible = [
        (index,)
        for index, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") or argument == "width"
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(key),): value for key, value in constants.items()},
        attrs={index: [["tt.divisibility", 16]] for index in divisible},
    )
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": warps})
    floor = tokens * block * STREAM_BYTES[dtype] * rows + 4 * block * QUERY_ROWS[name]
    if target == "gfx942":
        moved = _ir_bytes(compiled.asm["ttgir"], block)
    else:
        moved = _ptx_bytes(compiled.asm["ptx"]) * warps * 32
    return Compiled(spills_of(compiled, target), moved=moved, floor=floor)


def _ptx_bytes(ptx: str) -> int:
    """Bytes a thread moves in wide (vector) global accesses; scalars per token are the same address in all threads."""
    total = 0
    for vector, bits in re.findall(r"\b(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx):
        if vector:
            total += int(vector) * int(bits) // 8
    return total


def _ir_bytes(ir: str, block: int) -> int:
    """The same before register allocation, where a loop is still written once: loads and stores of whole rows."""
    total = 0
    for line in ir.splitlines():
        access = re.search(r"(?:load|store)\b.*: tensor<(?:(\d+)x)?(\d+)x(?:!tt\.ptr<)?(bf16|f16|f32)", line)
        if access and int(access[2]) == block:
            total += int(access[1] or 1) * block * (4 if access[3] == "f32" else 2)
    return total


def spills_of(compiled: Any, target: str) -> int:
    """Bytes of stack; on an AMD GPU with the vector registers that spill: scalar ones go into lanes of these."""
    if target == "gfx942":
        pattern = r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s*(\d+)"
        return sum(map(int, re.findall(pattern, compiled.asm["amdgcn"])))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage.stdout)))
