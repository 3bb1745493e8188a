"""When to read a whole folder again: hashes on first use, sizes always."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from darlit.atomic import write_text
from darlit.cache_folder import cache_folder
from darlit.data.errors import DataError
from darlit.data.manifest import Manifest
from darlit.errors import DarlitError


def verify(
    manifest: Manifest,
    how: Literal["first_use", "always", "sizes"],
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Check a folder's files against its manifest. Raises DataError with the path of the first bad one.

    ``sizes`` takes milliseconds. ``always`` reads and hashes every file. ``first_use`` does so unless this
    very folder passed before and no file's identity, size or change time differs since then; that it passed
    is noted in the cache folder.
    """
    manifest.check_sizes()
    if how == "sizes":
        return
    note = _note(manifest)
    state = _state_of_files(manifest)
    if how == "first_use" and note is not None and _read(note) == state:
        return
    manifest.check_hashes(on_bytes)
    with contextlib.suppress(OSError):  # no writable cache: the next run hashes again, which is slower and as safe
        if note is not None:
            write_text(note, state)


def _note(manifest: Manifest) -> Path | None:
    """Where it is noted that a folder passed; None: there is no cache folder."""
    try:
        folder = cache_folder()
    except DarlitError:
        return None
    return folder / "verified" / hashlib.sha256(str(manifest.folder.resolve()).encode()).hexdigest()


def _state_of_files(manifest: Manifest) -> str:
    state = {}
    for name in manifest.content["files"]:
        path = manifest.folder / name
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        state[name] = [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return json.dumps([manifest.fingerprint, state])


def _read(note: Path) -> str | None:
    try:
        return note.read_text(encoding="utf-8")
    except OSError:
        return None
