"""Chips that are not here, and what a kernel that is compiled for one of them spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


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
