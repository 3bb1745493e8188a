"""What calls do on a GPU, seen without one: kernels launched and their variants, operators dispatched, host tensors.

In Triton's interpreter the kernels run and are counted. In an ordinary process they are recorded as the just-in-time
compiler would see them, on tensors of the CPU, and do not run: their outputs are meaningless, but each launch can then
be compiled for any chip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from ops.ahead_of_time import TARGETS, spills_of

HOST_TENSORS = ("aten.lift_fresh", "aten._pin_memory", "aten.pin_memory", "aten._to_copy")
FILLS = ("aten.zero", "aten.ones", "aten.full", "aten.fill")
WAITS = ("aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.is_nonzero")


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def compile(self, target: str) -> Compiled:
        """As the launcher asked for it, with the compiler of ``target``, one of `ahead_of_time.TARGETS`."""
        source, options = self._specialised(TARGETS[target])
        return Compiled(target, triton.compile(source, target=TARGETS[target], options=options), options["num_warps"])

    def variant(self) -> str:
        """What the just-in-time compiler tells compilations of one kernel apart by, on an NVIDIA GPU."""
        source, options = self._specialised(TARGETS["sm_90"])
        return repr((self.name, source.signature, source.constants, source.attrs, options["num_warps"]))

    def _specialised(self, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
        backend = make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, keywords = bind(*self.arguments, **self.keywords)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, keywords, bound, specialization, None
        )
        return ASTSource(self.kernel, signature, constants, attributes), dict(options.__dict__)


@dataclass(frozen=True)
class Compiled:
    target: str
    compiled: Any
    warps: int

    @property
    def spills(self) -> int:
        return spills_of(self.compiled, self.target)

    def moved(self) -> int:
        """Bytes of a program's global loads and stores of more than a scalar, each loop run once; masked ones count."""
        total = 0
        for line in self.compiled.asm["ttir"].splitlines():
            access = re.search(r"tt\.(?:load|store) .*: tensor<([\dx]+)x!tt\.ptr<(bf16|f16|f32)>>", line)
            if access:
                total += math.prod(map(int, access[1].split("x"))) * (4 if access[2] == "f32" else 2)
        return total

    def narrow_accesses(self) -> int:
        """Loads and stores of a single 16-bit element: a stream that is not moved 16 bytes at a time."""
        if self.target == "gfx942":
            pattern = r"(?:global|buffer)_(?:load|store)_(?:short|ushort)"
            return len(re.findall(pattern, self.compiled.asm["amdgcn"]))
        return len(re.findall(r"\b(?:ld|st)\.global[.\w:]*?\.[bfsu]16\b", self.compiled.asm["ptx"]))


@dataclass
class Record:
    launches: list[Launch] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)

    def kernels(self) -> list[str]:
        return [launch.name for launch in self.launches]

    def of(self, *names: str) -> list[str]:
        """The dispatched operators whose name begins with one of these."""
        return [operator for operator in self.operators if operator.startswith(names)]

    def assert_only_launches(self) -> None:
        """No tensor made on the host or copied to the device, no fill kernel, no wait for the device."""
        forbidden = self.of(*HOST_TENSORS, *FILLS, *WAITS)
        assert not forbidden, forbidden


class _Operators(TorchDispatchMode):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.record.operators.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded() -> Iterator[Record]:
    """Record every kernel launch and dispatched operator of the block."""
    record, patched = Record(), {}

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        record.launches.append(Launch(kernel, grid, arguments, keywords))
        if isinstance(kernel, InterpretedFunction):
            with _disable_current_modes():
                patched[InterpretedFunction](kernel, *arguments, grid=grid, warmup=warmup, **keywords)

    for kind in (InterpretedFunction, JITFunction):
        patched[kind], kind.run = kind.run, run
    try:
        with _Operators(record):
            yield record
    finally:
        for kind, original in patched.items():
            kind.run = original
