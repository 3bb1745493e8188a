"""Streams under the sources: hashing while reading, and decompression that notices a cut file."""

from __future__ import annotations

import gzip
import hashlib
import io
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from darlit.data.errors import DataError

_BUFFER_BYTES = 2**20


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


class _ZstdFile(io.RawIOBase):
    """Decompresses zstd frames; raises EOFError where the last frame is cut."""

    def __init__(self, file: io.RawIOBase) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError("zstd files need zstandard: pip install zstandard") from error
        self._new = zstandard.ZstdDecompressor().decompressobj
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
            self._input = self._input or self._file.read(_BUFFER_BYTES) or b""
            if not self._input:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._frame = self._frame or self._new()
            self._output, self._input = self._frame.decompress(self._input), b""
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size


def decompress(file: HashingFile, compression: str) -> BinaryIO:
    """The decompressed, buffered stream of a file: ``compression`` is ``gzip``, ``zstd`` or empty."""
    if compression == "gzip":
        buffered = io.BufferedReader(file, _BUFFER_BYTES)
        return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=buffered), _BUFFER_BYTES))
    if compression == "zstd":
        return cast(BinaryIO, io.BufferedReader(_ZstdFile(file), _BUFFER_BYTES))
    return cast(BinaryIO, io.BufferedReader(file, _BUFFER_BYTES))
