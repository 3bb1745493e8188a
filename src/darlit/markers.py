"""Pages that people write and commands keep up to date between two lines."""

from __future__ import annotations

from pathlib import Path

from darlit.atomic import write_text
from darlit.errors import DarlitError


def markers(name: str) -> tuple[str, str]:
    """Return the lines before and after what ``name``, a command, keeps up to date; hidden where a page is shown."""
    return f"<!-- begin: {name} -->", f"<!-- end: {name} -->"


def replace_between(page: Path, name: str, text: str) -> None:
    """Put ``text`` between the :func:`markers` of a name in a page.

    Raises:
        DarlitError: a page that cannot be read, or has not both lines, once and in order.
    """
    begin, end = markers(name)
    try:
        content = page.read_text(encoding="utf-8")
    except OSError as error:
        reason = str(error.strerror).lower()
        raise DarlitError(f"{page}: {reason}; give a page that holds {begin} and {end}") from error
    if content.count(begin) != 1 or content.count(end) != 1 or content.index(begin) > content.index(end):
        raise DarlitError(f"{page} needs one line '{begin}' and below it one line '{end}', once each")
    before, rest = content.split(begin)
    write_text(page, f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
