"""The memory of tensors, counted from the tensors themselves: no allocator's luck in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensors:
    """Bytes of the tensors that it was shown and that are still alive, each storage once; and the most there were."""

    def __init__(self) -> None:
        self.live, self.peak = 0, 0
        self._known: set[int] = set()

    def show(self, tensors: Iterable[Any]) -> None:
        """Count what is a tensor and was not known yet."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._count(tensor)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class PeakMemory(TorchDispatchMode):
    """The most bytes of tensors alive at one time while the mode is on.

    Args:
        held: tensors that are alive already.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._tensors = LiveTensors()
        self._tensors.show(held)

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._tensors.live

    @property
    def peak(self) -> int:
        return self._tensors.peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        self._tensors.show(results(result))
        return result


def results(result: Any) -> Iterable[Any]:
    """What an operator returned, one by one."""
    return result if isinstance(result, (tuple, list)) else (result,)
