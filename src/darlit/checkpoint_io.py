"""Checkpoints that appear whole or not at all, as one file or, from a sharded run, as a folder.

Lightning writes into the system's temporary folder and moves the file into place, which is a copy wherever that
folder is on another disk than the run, as on most clusters: a kill in between leaves half a ``last.ckpt``. A folder
it writes under its final name. Both are written here beside their name and renamed. A folder cannot be replaced in
one move: between two renames the earlier checkpoint has the name ``.last.ckpt.old``, where `find` sees it.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.distributed.checkpoint import CheckpointException

from darlit import sharded_checkpoint
from darlit.atomic import errors_name, sync
from darlit.errors import DarlitError

_DAMAGED = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError, CheckpointException)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the checkpoint and renames; what a killed process left there is overwritten the next time."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` to the local file ``path``, making its folder as needed."""
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} is not allowed: checkpoints are local files")
        path = Path(path)
        partial = path.with_name(f".{path.name}.part")
        with errors_name(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove(partial)
            try:
                with partial.open("wb") as file:
                    _save(checkpoint, file)
                sync(partial)
                put_in_place(partial, path)
            finally:
                remove(partial)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Load a file, or a folder's weights and plain values."""
        if sharded_checkpoint.is_sharded(Path(path)):
            return sharded_checkpoint.read(Path(path))
        return super().load_checkpoint(path, *arguments, **options)


def _save(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    """Save to an open file; an error of the disk stays one, which PyTorch turns into an error of its own archive."""
    writer: Any = _Writer(file)
    try:
        torch.save(checkpoint, writer)
        file.flush()
    except RuntimeError:
        if writer.error is None:
            raise
        raise writer.error from None


class _Writer:
    """Passes writes on and keeps the first error of the disk."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return self.file.write(content)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def read_checkpoint(path: Path, with_weights: bool = False) -> dict[str, Any]:
    """Load a checkpoint's plain tensors and values on the CPU.

    Args:
        path: a file, or the folder of a sharded run.
        with_weights: put the weights of a folder together too; a file has them anyway.

    Raises:
        DarlitError: one that is damaged, is no darlit checkpoint, or would run code when loaded.
    """
    try:
        if path.is_dir():
            checkpoint = sharded_checkpoint.read(path) if with_weights else sharded_checkpoint.read_values(path)
        else:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _DAMAGED as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DarlitError(f"{path} is refused: not a checkpoint of plain tensors and values ({reason})") from error
    if not isinstance(checkpoint, dict) or "darlit" not in checkpoint:
        raise DarlitError(f"{path} is not a darlit checkpoint; give one that darlit fit wrote")
    return checkpoint


def find(path: Path) -> Path | None:
    """The whole checkpoint of this name, a file or a folder; None: there is none."""
    earlier = _earlier(path)
    return path if path.exists() else earlier if earlier.exists() else None


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a complete file or folder to ``path``, replacing what is there; whenever this ends, `find` finds one."""
    if partial.is_file() and not path.is_dir():
        partial.replace(path)
    else:
        if path.exists():
            remove(_earlier(path))
            path.rename(_earlier(path))
        partial.rename(path)
    remove(_earlier(path))


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _earlier(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
