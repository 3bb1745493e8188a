"""Where texts come from: files, globs, folders and fsspec URLs, read as batches of documents.

A source is one file. Its documents are numbered from 0: lines of a jsonl file, rows of a parquet file, and of
a text file the whole file, its paragraphs or its lines. Reading keeps memory flat whatever the file's size.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from darlit.data.errors import DataError
from darlit.data.streams import HashingFile, decompress
from darlit.data.tokenizers import last_safe_cut

Kind = Literal["text", "jsonl", "parquet"]
TextUnit = Literal["file", "paragraph", "line"]

BATCH_BYTES = 2**20
BATCH_RECORDS = 4096
DIGEST_BYTES = 16
WHOLE_FILE_BYTES = 16 * 2**20  # a text file that is one document is read at once up to here, else in parts

_TEXT_ENDINGS = [
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".tex",
    ".html",
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".java",
    ".js",
    ".ts",
    ".rs",
    ".go",
    ".sh",
]
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(_TEXT_ENDINGS, "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Source:
    """One file. ``stamp`` changes when the file does (mtime or ETag); ``name`` is what the manifest calls it."""

    url: str
    name: str
    size: int
    stamp: str
    kind: Kind
    compression: str


@dataclass
class Batch:
    """Some consecutive records of one source.

    ``records`` are documents, except for jsonl, where they are lines that are still to be parsed.
    ``offsets`` are the documents' places in a text file. A text file longer than WHOLE_FILE_BYTES comes in
    parts: ``digest`` is then the whole document's, ``continues`` says that this part goes on with the document
    of the batch before, and ``open_end`` that the next one goes on with this.
    """

    first: int
    records: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    digest: bytes | None = None
    continues: bool = False
    open_end: bool = False


def find_sources(specs: Sequence[str]) -> tuple[list[Source], int]:
    """Resolve files, globs, folders and URLs into sources, sorted by URL, each once.

    Folders give the files whose endings are known; any other text file is taken when it, or a glob that
    matches it, is named. Returns the sources and how many files of folders were left out.
    """
    found: dict[str, Source] = {}
    left_out = 0
    for spec in specs:
        for url, info, named in _resolve(spec):
            kind, compression = _kind_of(url)
            if kind is None and not named:
                left_out += 1
                continue
            stamp = str(info.get("mtime") or info.get("ETag") or info.get("etag") or info.get("created") or "")
            found[url] = Source(url, url, int(info["size"] or 0), stamp, kind or "text", compression)
    if not found:
        known = " ".join(_KINDS)
        raise DataError(
            f"no texts in {', '.join(specs)} ({left_out} files with other endings than {known}); "
            "name files or a glob such as 'folder/*.log'"
        )
    return [found[url] for url in sorted(found)], left_out


def _resolve(spec: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield (url, info, named by the user) for every file that a spec stands for."""
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(spec)
        if glob.has_magic(spec):
            infos = filesystem.glob(path, detail=True)
            matches = [(infos[name], True) for name in sorted(infos) if infos[name]["type"] == "file"]
            if not matches:
                raise DataError(f"{spec}: the glob matches no file")
        else:
            info = filesystem.info(path)
            if info["type"] == "directory":
                infos = filesystem.find(path, detail=True)
                matches = [(infos[name], False) for name in sorted(infos) if not _hidden(name, path)]
            else:
                matches = [(info, True)]
    except FileNotFoundError as error:
        raise DataError(f"{spec}: no such file or folder") from error
    except DataError:
        raise
    except Exception as error:  # file systems raise their own kinds
        raise DataError(f"{spec}: cannot be listed: {' '.join(str(error).split())}") from error
    for info, named in matches:
        local = "local" in _protocols(filesystem)
        yield (info["name"] if local else filesystem.unstrip_protocol(info["name"])), info, named


def _protocols(filesystem: Any) -> tuple[str, ...]:
    return (filesystem.protocol,) if isinstance(filesystem.protocol, str) else tuple(filesystem.protocol)


def _hidden(name: str, root: str) -> bool:
    return any(part.startswith(".") for part in Path(name[len(root) :]).parts)


def _kind_of(url: str) -> tuple[Kind | None, str]:
    suffixes = [suffix.lower() for suffix in Path(url).suffixes]
    compression = _COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes = suffixes[:-1]
    return (_KINDS.get(suffixes[-1]) if suffixes else None), compression


class SourceReader:
    """Reads one source once. After the last batch, ``sha256`` and ``bytes_read`` describe the whole file.

    Raises DataError for anything that cannot be read, with the path and where in it.
    """

    def __init__(self, source: Source, text_field: str, text_unit: TextUnit) -> None:
        self.source = source
        self.text_field = text_field
        self.text_unit = text_unit
        self.bytes_read = 0
        self.sha256 = ""

    def batches(self) -> Iterator[Batch]:
        try:
            with self._open_raw() as raw:
                hashing = HashingFile(raw, self._count)
                if self.source.kind == "parquet":
                    yield from self._parquet(raw)
                    raw.seek(0)
                else:
                    yield from self._records(decompress(hashing, self.source.compression))
                while hashing.read(BATCH_BYTES):
                    pass
                self.sha256 = hashing.sha256
        except DataError:
            raise
        except EOFError as error:
            raise DataError(
                f"{self.source.name}: cut off: ends in the middle of its {self.source.compression} stream"
            ) from error
        except Exception as error:  # zlib, zstd, arrow and file systems raise their own kinds
            raise DataError(f"{self.source.name}: cannot be read: {' '.join(str(error).split())}") from error

    def _count(self, number: int) -> None:
        self.bytes_read += number

    def _open_raw(self) -> BinaryIO:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(self.source.url)
        file: BinaryIO = filesystem.open(path, "rb")
        return file

    def _records(self, stream: BinaryIO) -> Iterator[Batch]:
        if self.source.kind == "jsonl":
            return self._lines(stream)
        if self.text_unit == "file":
            return self._whole(stream)
        return self._units(stream)

    def _lines(self, stream: BinaryIO) -> Iterator[Batch]:
        """Lines of jsonl; a document's number is its line's, blank lines are no documents but are counted."""
        batch, size = Batch(0), 0
        for number, line in enumerate(stream):
            batch.records.append(line)
            size += len(line)
            if size >= BATCH_BYTES or len(batch.records) >= BATCH_RECORDS:
                yield batch
                batch, size = Batch(number + 1), 0
        if batch.records:
            yield batch

    def _units(self, stream: BinaryIO) -> Iterator[Batch]:
        """Paragraphs (ended by blank lines, which they keep) or lines, with their line ends."""
        batch, size, offset = Batch(0), 0, 0
        for number, unit in enumerate(_paragraphs(stream) if self.text_unit == "paragraph" else stream):
            batch.records.append(unit)
            batch.offsets.append(offset)
            size += len(unit)
            offset += len(unit)
            if size >= BATCH_BYTES or len(batch.records) >= BATCH_RECORDS:
                yield batch
                batch, size = Batch(number + 1), 0
        if batch.records:
            yield batch

    def _whole(self, stream: BinaryIO) -> Iterator[Batch]:
        text = stream.read(WHOLE_FILE_BYTES + 1)
        if len(text) <= WHOLE_FILE_BYTES:
            yield Batch(0, [text], [0])
            return
        digest, offset = self._digest_of_whole(), 0
        while True:
            if len(text) <= BATCH_BYTES:
                text += stream.read(BATCH_BYTES)
            if len(text) <= BATCH_BYTES:
                yield Batch(0, [text], [offset], digest, continues=True)
                return
            cut = last_safe_cut(text[:BATCH_BYTES])
            yield Batch(0, [text[:cut]], [offset], digest, continues=offset > 0, open_end=True)
            text, offset = text[cut:], offset + cut

    def _digest_of_whole(self) -> bytes:
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        with self._open_raw() as raw:
            stream = decompress(HashingFile(raw, lambda _: None), self.source.compression)
            while block := stream.read(BATCH_BYTES):
                digest.update(block)
        return digest.digest()

    def _parquet(self, raw: BinaryIO) -> Iterator[Batch]:
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise DataError(f"{self.source.name}: parquet needs pyarrow: pip install pyarrow") from error
        file = parquet.ParquetFile(raw)
        names = file.schema_arrow.names
        if self.text_field not in names:
            raise DataError(
                f"{self.source.name}: no field {self.text_field!r}; it has {', '.join(names)}: choose with --text-field"
            )
        found = file.schema_arrow.field(self.text_field).type
        text_types = (arrow.string(), arrow.large_string(), arrow.binary(), arrow.large_binary())
        if found not in text_types:
            raise DataError(f"{self.source.name}: field {self.text_field!r} is {found}, not text")
        number = 0
        for rows in file.iter_batches(batch_size=256, columns=[self.text_field]):
            values = rows.column(0).to_pylist()
            if None in values:
                raise DataError(
                    f"{self.source.name}: row {number + values.index(None)}: field {self.text_field!r} is null"
                )
            yield Batch(number, [v if isinstance(v, bytes) else v.encode("utf-8") for v in values])
            number += len(values)


def _paragraphs(stream: BinaryIO) -> Iterator[bytes]:
    lines: list[bytes] = []
    blank = False
    for line in stream:
        if blank and line.strip():
            yield b"".join(lines)
            lines = []
        lines.append(line)
        blank = not line.strip()
    if lines:
        yield b"".join(lines)


def document_digest(document: bytes) -> bytes:
    """16 bytes of BLAKE2b: decides a document's split and finds exact duplicates."""
    return hashlib.blake2b(document, digest_size=DIGEST_BYTES).digest()


def parse_json_lines(batch: Batch, source: Source, text_field: str) -> tuple[list[int], list[bytes]]:
    """Numbers (of lines, from 0) and texts of the documents in a batch of jsonl lines."""
    numbers, documents = [], []
    for number, line in enumerate(batch.records, batch.first):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            raise DataError(f"{source.name}: line {number + 1}: not JSON: {error}") from error
        if not isinstance(record, dict) or text_field not in record:
            has = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
            raise DataError(
                f"{source.name}: line {number + 1}: no field {text_field!r}; it has {has}: choose with --text-field"
            )
        text = record[text_field]
        if not isinstance(text, str):
            raise DataError(
                f"{source.name}: line {number + 1}: field {text_field!r} is {type(text).__name__}, not text"
            )
        numbers.append(number)
        documents.append(text.encode("utf-8", "surrogatepass"))
    return numbers, documents
