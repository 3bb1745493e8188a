"""The files that a spec stands for: a file, a folder, a glob or an fsspec URL of one of these.

On local disks links to files and folders are followed. Each file is listed once, whatever the number of its names.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from darlit.data.errors import DataError


@dataclass(frozen=True)
class Listed:
    """One file. ``stamp`` changes when the file does (mtime or ETag)."""

    url: str
    size: int
    stamp: str


@dataclass
class Listing:
    """Files by URL, the number of files in folders that were not wanted, and a line for each name that is a link and
    was left out."""

    files: dict[str, Listed] = field(default_factory=dict)
    unwanted: int = 0
    notes: list[str] = field(default_factory=list)


def list_files(specs: Sequence[str], wanted: Callable[[str], bool]) -> Listing:
    """List all files of all specs.

    Args:
        specs: files, globs, folders and URLs.
        wanted: whether to take a file of this URL from a folder; named ones and those that a glob matches are taken.

    Raises:
        DataError: a spec that matches nothing, a link to nothing, or a file system that cannot be listed.
    """
    listing = Listing()
    for spec in specs:
        try:
            for file in _local(spec, wanted, listing) if _is_local(spec) else _remote(spec, wanted, listing):
                listing.files[file.url] = file
        except FileNotFoundError as error:
            raise DataError(f"{spec}: no such file or folder") from error
        except DataError:
            raise
        except Exception as error:  # file systems raise their own kinds
            raise DataError(f"{spec}: cannot be listed: {' '.join(str(error).split())}") from error
    _keep_one_name(listing)
    return listing


def _is_local(spec: str) -> bool:
    import fsspec

    return type(fsspec.core.url_to_fs(spec)[0]).__name__ == "LocalFileSystem"


def _remote(spec: str, wanted: Callable[[str], bool], listing: Listing) -> Iterator[Listed]:
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(spec)
    in_folder = not glob.has_magic(spec) and filesystem.isdir(path)
    if in_folder:
        found = filesystem.find(path, detail=True)
        infos = [info for name, info in found.items() if not _hidden(name, path)]
    elif glob.has_magic(spec):
        infos = [info for info in filesystem.glob(path, detail=True).values() if info["type"] != "directory"]
        if not infos:
            raise DataError(f"{spec}: the glob matches no file")
    else:
        infos = [filesystem.info(path)]
    for info in infos:
        url = filesystem.unstrip_protocol(info["name"])
        if in_folder and not wanted(url):
            listing.unwanted += 1
        else:
            yield Listed(url, int(info["size"] or 0), _stamp_of(info))


def _stamp_of(info: dict[str, Any]) -> str:
    return str(info.get("mtime") or info.get("ETag") or info.get("etag") or info.get("created") or "")


def _local(spec: str, wanted: Callable[[str], bool], listing: Listing) -> Iterator[Listed]:
    import fsspec

    path = fsspec.core.url_to_fs(spec)[1]
    if glob.has_magic(spec):
        names = list(_matches(path, listing.notes))
        if not names:
            raise DataError(f"{spec}: the glob matches no file")
        yield from map(_stat, names)
    elif Path(path).is_dir():
        for name in _walk(path, None, listing.notes, hidden=False):
            if wanted(name):
                yield _stat(name)
            else:
                listing.unwanted += 1
    else:
        yield _stat(path)


def _matches(pattern: str, notes: list[str]) -> Iterator[str]:
    from fsspec.utils import glob_translate

    parts = pattern.split("/")
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    depth = None if "**" in parts else len(parts) - first
    matches = re.compile(glob_translate(pattern)).match
    base = "/".join(parts[:first]) or "/"
    return filter(matches, _walk(base, depth, notes) if Path(base).is_dir() else ())


def _stat(path: str) -> Listed:
    try:
        found = Path(path).stat()
    except FileNotFoundError:
        if not Path(path).is_symlink():
            raise
        raise DataError(
            f"{path}: a link to {Path(path).readlink()}, which does not exist; fix the link or remove it"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: a pipe or a device, not a file; write what comes out of it into a file first")
    return Listed(path, found.st_size, str(found.st_mtime))


def _walk(
    folder: str, depth: int | None, notes: list[str], *, hidden: bool = True, above: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield the files below a folder, down to ``depth`` levels, through links but not round a loop of them."""
    real = os.path.realpath(folder)
    if any(inner == real or inner.startswith(real.rstrip("/") + "/") for inner in above):
        notes.append(f"{folder} is a link to a folder that it is in: not followed")
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") and not hidden:
            continue
        if not entry.is_dir():
            yield f"{folder.rstrip('/')}/{entry.name}"
        elif depth is None or depth > 1:
            lower = depth and depth - 1
            yield from _walk(entry.path, lower, notes, hidden=hidden, above=(*above, real))


def _keep_one_name(listing: Listing) -> None:
    """Of several names of one local file keep the file's own, else the first, and note the others."""
    names: dict[str, str] = {}
    for url in sorted(listing.files):
        real = os.path.realpath(url) if url.startswith("/") else url
        if real != url and real in listing.files:
            names[real] = real
        first = names.setdefault(real, url)
        if url != first:
            listing.notes.append(f"{url} is {first} under another name: taken once")
            del listing.files[url]


def _hidden(name: str, root: str) -> bool:
    return any(part.startswith(".") for part in Path(name[len(root) :]).parts)
