"""The base of every error that a user can mend: the command line prints its one line without a traceback."""

from __future__ import annotations


class DarlitError(ValueError):
    """One line: what was given, what is allowed, what to type."""
