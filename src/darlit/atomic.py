"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yield a neighbour of ``path`` to write to, and rename it to ``path`` when the block ends without an error.

    The folder of ``path`` is made as needed. An error leaves ``path`` as it was and nothing beside it.

    Raises:
        OSError: names ``path``; a full disk, no permission, ...
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    with errors_name(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            sync(partial)
            partial.replace(path)
        finally:
            _remove(partial)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, complete or not at all."""
    with partial_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Name ``path`` in errors of the disk, which often name no file, or one that only stands in for it."""
    try:
        yield
    except OSError as error:
        stands_in = error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(f".{path.name}.")
        if error.errno is None or not stands_in:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: Path) -> None:
    """Put a file on the disk: else a crash of the machine can leave the new name with none of the content."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove(partial: Path) -> None:
    try:
        partial.unlink(missing_ok=True)
    except OSError:  # what stopped the writing stops this too; the first error is the one to report
        return
