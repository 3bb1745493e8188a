"""Where this machine keeps what can be made again: compiled kernels and the default corpus."""

from __future__ import annotations

import os
from pathlib import Path

from darlit.errors import DarlitError


def cache_folder() -> Path:
    """Return ``$DARLIT_CACHE``, or ``darlit`` in the user's cache folder; an empty variable counts as unset.

    Raises:
        DarlitError: there is no home folder to begin from.
    """
    chosen = os.environ.get("DARLIT_CACHE", "").strip()
    folder = chosen or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/darlit"
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise DarlitError(f"no home folder for {folder}; set DARLIT_CACHE to a folder to keep caches in") from error
