"""The base of every error that a user can fix: the command line prints its one line without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DarlitError(ValueError):
    """One line: what was given, what is allowed, what to type."""

    exit_status = 2
    """What ``darlit`` exits with."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what to say about a name that is not known: the nearest valid one, and all of them where they are few."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    allowed = f"allowed are {', '.join(names) or 'none'}"
    if not near:
        return allowed
    return f"did you mean {near[0]}?" + (f" {allowed}" if len(names) <= 6 else "")
