"""A sharded run's checkpoint: a folder with the tensors that each rank wrote, and one file with everything else.

The tensors are in PyTorch's distributed format, whose index (``.metadata``) is a pickle; so are values beside tensors,
such as an optimiser's rates. Neither may run code here: only the index's own classes are unpickled, and plain values.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

INDEX, VALUES = ".metadata", "meta.pt"
"""The files that a whole folder has, written last; the names are PyTorch's and Lightning's."""
WEIGHTS = "state_dict."
"""How names of the model's tensors begin."""


def is_sharded(path: Path) -> bool:
    """Whether this is a folder of that kind."""
    return (path / INDEX).is_file() and (path / VALUES).is_file()


def read_values(path: Path) -> dict[str, Any]:
    """Everything but the tensors: what a checkpoint in one file holds beside weights and optimiser states.

    Raises:
        pickle.UnpicklingError: the folder would run code.
    """
    _Reader(path).read_metadata()
    values: dict[str, Any] = torch.load(path / VALUES, map_location="cpu", weights_only=True)
    return values


def read(path: Path) -> dict[str, Any]:
    """The values and the whole weights (``state_dict``), on the CPU; one process is enough, however many wrote them."""
    values, index = read_values(path), _Reader(path).read_metadata()
    weights = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in index.state_dict_metadata.items()
        if name.startswith(WEIGHTS) and isinstance(stored, TensorStorageMetadata)
    }
    dcp.load(weights, storage_reader=_Reader(path), planner=_Planner(), no_dist=True)
    return {**values, "state_dict": {name.removeprefix(WEIGHTS): tensor for name, tensor in weights.items()}}


def load_into(state: dict[str, Any], path: Path) -> None:
    """Fill the (sharded) tensors of ``state`` and set its other values; all ranks together."""
    dcp.load(state, storage_reader=_Reader(path), planner=_Planner())


_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
"""Whose classes an index consists of, but for the path that it was written to."""


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        with (Path(self.path) / INDEX).open("rb") as file:
            _IndexUnpickler(file).load()
        return super().read_metadata(*arguments, **options)


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes that an index consists of, and nothing that does something when called."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return super().find_class(module, name)
        found = super().find_class(module, name) if module in _MODULES or module.startswith("pathlib") else None
        if isinstance(found, type) and (found.__module__ == module or issubclass(found, PurePath)):
            return found
        raise pickle.UnpicklingError(f"its index asks for {module}.{name}")


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Plain values only; the base would unpickle anything."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
