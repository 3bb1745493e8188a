"""Streams under the sources: hashing while reading, and decompression that notices a cut file."""

from __future__ import annotations

import bz2
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, cast

from darlit.data.errors import DataError

_BUFFER_BYTES = 2**20
_INPUT_BYTES = 2**16  # decompressed, these are at most some MiB of text


class HashingFile(io.RawIOBase):
    """Passes a file's bytes on, hashes them, and tells ``on_bytes`` how many."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._on_bytes = on_bytes
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        self._on_bytes(len(data))
        return len(data)

    @property
    def sha256(self) -> str:
        """Hex digest of everything read so far."""
        return self._digest.hexdigest()


class _Frames(io.RawIOBase):
    """Decompresses the frames of a file, one after the other; raises EOFError where the last one is cut."""

    def __init__(self, file: BinaryIO, new_frame: Callable[[], Any]) -> None:
        self._new_frame = new_frame
        self._file = file
        self._frame: Any = None
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if self._frame is not None and self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
            self._input = self._input or self._file.read(_INPUT_BYTES) or b""
            if not self._input:
                if self._frame is not None:
                    raise EOFError
                return 0
            if self._frame is None:
                self._input = self._input.lstrip(b"\0")  # frames may be padded
                if not self._input:
                    continue
                self._frame = self._new_frame()
            self._output, self._input = self._frame.decompress(self._input), b""
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size


def _zstd() -> Callable[[], Any]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError("zstd files need zstandard: pip install zstandard") from error
    return cast(Callable[[], Any], zstandard.ZstdDecompressor().decompressobj)


def decompress(file: BinaryIO, compression: str) -> io.BufferedReader:
    """The decompressed, buffered stream of a file.

    Args:
        file: the compressed bytes.
        compression: ``gzip``, ``bz2``, ``xz``, ``zstd``, or empty for bytes that are not compressed.
    """
    frames: dict[str, Callable[[], Callable[[], Any]]] = {
        "gzip": lambda: partial(zlib.decompressobj, zlib.MAX_WBITS | 16),
        "bz2": lambda: bz2.BZ2Decompressor,
        "xz": lambda: lzma.LZMADecompressor,
        "zstd": _zstd,
    }
    raw: Any = _Frames(file, frames[compression]()) if compression else file
    return io.BufferedReader(raw, _BUFFER_BYTES)
