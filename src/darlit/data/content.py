"""What a file holds, told from its first bytes, whatever its name says."""

from __future__ import annotations

import re

HEAD_BYTES = 8192
"""How much of a file is looked at."""

_COMPRESSIONS = {
    "gzip": rb"\x1f\x8b\x08",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "bz2": rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)",
    "xz": rb"\xfd7zXZ\0",
}
_NOT_TEXT = {
    "a Parquet file": rb"PAR1",
    "a zip archive (.zip, .npz, .docx, .pt)": rb"PK(\x03\x04|\x05\x06)",
    "a NumPy array": rb"\x93NUMPY",
    "an HDF5 file": rb"\x89HDF\r\n\x1a\n",
    "an Arrow file": rb"ARROW1",
    "a tar archive": rb".{257}ustar",
    "a 7z archive": rb"7z\xbc\xaf\x27\x1c",
    "a rar archive": rb"Rar!\x1a\x07",
    "lz4 data": rb"\x04\x22\x4d\x18",
    "a PDF document": rb"%PDF-",
    "an SQLite database": rb"SQLite format 3\0",
    "an image": rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP",
    "a program": rb"\x7fELF",
}
_ENOUGH_BYTES = 512
"""A zero byte in so many speaks against text; a shorter file may hold one."""


def compression_of(head: bytes) -> str:
    """``gzip``, ``zstd``, ``bz2``, ``xz``, or empty: not a compressed file that can be read."""
    return _first_match(_COMPRESSIONS, head)


def why_not_text(head: bytes) -> str | None:
    """Say what the head of a file is and what to do with it; None: nothing speaks against text.

    Other encodings than UTF-16 and UTF-32 are not judged: bytes that are not UTF-8 may be text of an older one.
    """
    if what := _first_match(_NOT_TEXT, head):
        remedy = "give it a name that ends in .parquet" if what == "a Parquet file" else "extract its texts first"
        return f"is {what}, not text; {remedy}, or leave it out"
    if what := compression_of(head):
        return f"is {what} data where text was expected; decompress it first"
    if encoding := _wide_encoding(head):
        return f"is {encoding} text; convert it: iconv -f {encoding} -t UTF-8 OLD > NEW"
    if 0 in head and len(head) >= _ENOUGH_BYTES:
        return f"is binary data, not text (byte {head.index(0)} is zero); extract its texts first, or leave it out"
    return None


def _wide_encoding(head: bytes) -> str:
    """UTF-32 or UTF-16 by its byte order mark, or UTF-16 of a mostly Latin text without one; empty: neither."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if len(head) % 2:
        return ""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if len(head) < 8 or max(even, odd) < len(head) // 4 or min(even, odd) > len(head) // 32:
        return ""
    return "UTF-16BE" if even > odd else "UTF-16LE"


def _first_match(patterns: dict[str, bytes], head: bytes) -> str:
    return next((what for what, pattern in patterns.items() if re.match(pattern, head, re.DOTALL)), "")
