"""Writing one split: a stream of tokens cut into litdata chunks, and the place of every document in it.

A chunk is what litdata's own writer makes of one item: the header ``(1, 12, size)`` in uint32, then the
tokens. One item a chunk means that ``TokensLoader`` can cut it into blocks of any length later, so one
prepared folder serves every sequence length up to a chunk's size. The writer's place is two numbers (tokens
and documents so far): preparation stops and goes on by writing them down.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

CHUNK_TOKENS = 2**24
INDEX_FILE = "index.json"
DOCUMENTS_FILE = "documents.bin"
HEADER = struct.Struct("<3I")

# One record a document, in stream order: first token, number of its source, number within that source.
DOCUMENT_DTYPE = np.dtype([("start", "<u8"), ("source", "<u4"), ("number", "<u4")])

# What litdata's index calls these dtypes (their places in its table of numpy dtypes).
_LITDATA_FORMATS = {np.dtype(np.uint16): "no_header_numpy:5", np.dtype(np.uint32): "no_header_numpy:6"}
_LITDATA_LEAF = json.dumps([1, {"type": None, "context": None, "children_spec": []}])


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 where every id fits, else uint32."""
    return np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.uint32)


def chunk_name(number: int) -> str:
    return f"chunk-0-{number}.bin"


class SplitWriter:
    """Appends tokens to the chunks of one split folder.

    Args:
        folder: where the chunks go; made if missing.
        dtype: uint16 or uint32.
        chunk_tokens: tokens a chunk; only the last chunk may be shorter.
        tokens, documents: go on from this place of an earlier writer; what it wrote after it is dropped.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], chunk_tokens: int, tokens: int = 0, documents: int = 0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.dtype = dtype
        self.chunk_tokens = chunk_tokens
        self.tokens = tokens
        self.documents = documents
        self._chunk: BinaryIO | None = None
        self._documents = _reopen(folder / DOCUMENTS_FILE, documents * DOCUMENT_DTYPE.itemsize)
        number, inside = divmod(tokens, chunk_tokens)
        for path in folder.glob("chunk-0-*.bin"):
            if int(path.stem.rsplit("-", 1)[1]) >= number + (inside > 0):
                path.unlink()
        if inside:
            self._chunk = _reopen(folder / chunk_name(number), HEADER.size + inside * dtype.itemsize)

    def write(self, tokens_N: NDArray[np.integer], starts: Sequence[int], source: int, numbers: Sequence[int]) -> None:
        """Append ids, any integer dtype; they run on from chunk to chunk.

        ``starts`` are the places in ``tokens_N`` where documents begin, ``numbers`` theirs in the source.
        """
        records = np.empty(len(starts), dtype=DOCUMENT_DTYPE)
        records["start"] = self.tokens + np.asarray(starts, dtype=np.uint64)
        records["source"] = source
        records["number"] = numbers
        self._documents.write(records.tobytes())
        self.documents += len(starts)
        tokens_N = tokens_N.astype(self.dtype, copy=False)
        while len(tokens_N):
            inside = self.tokens % self.chunk_tokens
            if self._chunk is None:
                self._chunk = self._open_chunk()
            part = tokens_N[: self.chunk_tokens - inside]
            self._chunk.write(np.ascontiguousarray(part).view(np.uint8).data)
            self.tokens += len(part)
            tokens_N = tokens_N[len(part) :]
            if self.tokens % self.chunk_tokens == 0:
                self._close_chunk()

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self._documents.flush()
        if self._chunk is not None:
            self._chunk.flush()

    def finish(self) -> list[dict[str, Any]]:
        """Close the files, write litdata's index and return one ``{file, first_token, tokens}`` a chunk."""
        inside = self.tokens % self.chunk_tokens
        if self._chunk is not None:
            self._chunk.seek(0)
            self._chunk.write(self._header(inside))
            self._close_chunk()
        _close(self._documents)
        chunks = []
        for first in range(0, self.tokens, self.chunk_tokens):
            size = min(self.chunk_tokens, self.tokens - first)
            name = chunk_name(first // self.chunk_tokens)
            chunks.append({"file": name, "first_token": first, "tokens": size})
        self._write_index(chunks)
        return chunks

    def close(self) -> None:
        """Close the files as they are, for a later writer to go on from."""
        for file in (self._chunk, self._documents):
            if file is not None:
                file.close()

    def _header(self, tokens: int) -> bytes:
        return HEADER.pack(1, HEADER.size, HEADER.size + tokens * self.dtype.itemsize)

    def _open_chunk(self) -> BinaryIO:
        file = (self.folder / chunk_name(self.tokens // self.chunk_tokens)).open("w+b")
        file.write(self._header(self.chunk_tokens))
        return file

    def _close_chunk(self) -> None:
        assert self._chunk is not None
        _close(self._chunk)
        self._chunk = None

    def _write_index(self, chunks: list[dict[str, Any]]) -> None:
        config = {
            "compression": None,
            "compression_level": None,
            "compression_batch_size": None,
            "ipc_compression": None,
            "chunk_size": self.chunk_tokens,
            "chunk_bytes": None,
            "data_format": [_LITDATA_FORMATS[self.dtype]],
            "data_spec": _LITDATA_LEAF,
            "types": None,
            "encryption": None,
            "item_loader": "TokensLoader",
        }
        entries = [
            {
                "chunk_bytes": HEADER.size + chunk["tokens"] * self.dtype.itemsize,
                "chunk_size": 1,
                "dim": chunk["tokens"],
                "filename": chunk["file"],
            }
            for chunk in chunks
        ]
        with (self.folder / INDEX_FILE).open("wb") as file:
            file.write(json.dumps({"chunks": entries, "config": config}, sort_keys=True).encode())
            os.fsync(file.fileno())


def _reopen(path: Path, size: int) -> BinaryIO:
    """Open for appending after the first ``size`` bytes, dropping the rest."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
