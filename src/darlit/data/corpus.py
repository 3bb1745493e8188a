"""The default corpus: the sources of the Python standard library. Always there, real, free, no download."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from darlit.cache_folder import cache_folder
from darlit.data.errors import DataError
from darlit.data.options import Holdout
from darlit.data.sources import Source

LICENCE = "Python Software Foundation License Version 2 (PSF-2.0), https://docs.python.org/3/license.html"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def standard_library_sources() -> list[Source]:
    """The ``*.py`` files of the running interpreter's standard library, without tests and third parties."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(relative.parts):
            stat = path.stat()
            sources.append(
                Source(str(path), f"python-stdlib/{relative.as_posix()}", stat.st_size, str(stat.st_mtime), "text", "")
            )
    if not sources:
        raise DataError(
            f"no standard library sources in {root} (a Python without them); prepare texts of your own: "
            "darlit prepare SOURCE --out FOLDER, and give the folder"
        )
    return sources


def default_folder(tokenizer: str, holdout: Holdout = "validation") -> Path:
    """Where the default corpus is prepared for a tokenizer (``bytes`` or ``bpe``)."""
    version = ".".join(map(str, sys.version_info[:3]))
    suffix = "-screening" if holdout == "screening" else ""
    return cache_folder() / f"python-{version}-{tokenizer}{suffix}"
