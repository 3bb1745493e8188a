"""Checkpoints that appear whole or not at all.

Lightning writes into the system's temporary folder and moves the file into place, which is a copy wherever that
folder is on another disk than the run, as on most clusters: a kill in between leaves half a ``last.ckpt``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the checkpoint and renames; what a killed process left there is overwritten the next time."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` to the local file ``path``, making its folder as needed."""
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} is not allowed: checkpoints are local files")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.part")
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
