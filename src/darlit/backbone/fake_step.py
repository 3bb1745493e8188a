"""Fake tensors, which have shapes and storages but no memory, and how much memory they would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from darlit.live_tensors import LiveTensors, results


class FakeStep(FakeTensorMode):
    """While it is on every new tensor is a fake one of the CPU, and is counted.

    It also stands in for what PyTorch's fake tensors cannot do of experts: grouped products in float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors = LiveTensors()
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of all calls
            return args[0].fake_device
        stand_in = _STAND_INS.get(func)
        if stand_in is not None:
            return stand_in(*args, **(kwargs or {}))
        self._depth += 1
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:  # inside, an operator finds its result's shape in ways that the real one does not go
            self.tensors.show(results(result))
        return result


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """``[A, m] x [E, m, n] -> [A, n]``, or ``[m, A] x [A, n] -> [E, m, n]``, a group to each of the E ``offs``."""
    shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(offs), a.shape[0], b.shape[-1])
    return a.new_empty(shape)


_STAND_INS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten._grouped_mm.default: _grouped_product,
}
