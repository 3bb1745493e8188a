"""The one exception that bad data, bad options and damaged folders raise."""

from __future__ import annotations

from darlit.errors import DarlitError


class DataError(DarlitError):
    """Data that cannot be used: one line that says what was given, what is wrong and what to type."""
