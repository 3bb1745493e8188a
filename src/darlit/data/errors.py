"""The one exception that bad data, bad options and damaged folders raise."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used: one line that says what was given, what is wrong and what to type."""
