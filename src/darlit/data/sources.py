"""Where texts come from: files, globs, folders and fsspec URLs, read as batches of documents.

A source is one file. Its documents are numbered from 0: lines of a jsonl file, rows of a parquet file, and of
a text file the whole file, its paragraphs or its lines. Reading keeps memory flat whatever the file's size.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from darlit.data.content import HEAD_BYTES, compression_of, why_not_text
from darlit.data.errors import DataError
from darlit.data.listing import list_files
from darlit.data.streams import HashingFile, decompress
from darlit.data.tokenizers import last_safe_cut

Kind = Literal["text", "jsonl", "parquet"]
TextUnit = Literal["file", "paragraph", "line"]

BATCH_BYTES = 2**20
BATCH_RECORDS = 4096
DIGEST_BYTES = 16
_SMALLEST_PART = 8  # bytes of a document cut from a file: two characters at least
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
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}


@dataclass(frozen=True)
class Source:
    """One file. ``stamp`` changes when the file does (mtime or ETag); ``name`` is what the manifest calls it.

    ``kind`` and ``compression`` are what its name promises. Its content decides: text and jsonl files may be compressed
    under any name, and anything else than what was promised is rejected when the file is read.
    """

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
    parts: ``digest`` is then that of the complete document, ``continues`` says that this part continues the document
    of the batch before, and ``open_end`` that the next one continues this.
    """

    first: int
    records: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    digest: bytes | None = None
    continues: bool = False
    open_end: bool = False


def find_sources(specs: Sequence[str], notes: list[str] | None = None) -> tuple[list[Source], int]:
    """Resolve files, globs, folders and URLs into sources, sorted by URL, each once.

    Folders give the files whose endings are known; any other text file is taken when it, or a glob that
    matches it, is named. Returns the sources and how many files of folders were left out; a line for each link that was
    left out is added to ``notes``.
    """
    listing = list_files(specs, wanted=lambda url: _kind_of(url)[0] is not None)
    sources = []
    for url, file in sorted(listing.files.items()):
        kind, compression = _kind_of(url)
        sources.append(Source(url, url, file.size, file.stamp, kind or "text", compression))
    if not sources:
        known = " ".join(_KINDS)
        raise DataError(
            f"no texts in {', '.join(specs)} ({listing.unwanted} files with other endings than {known}); "
            "name files or a glob such as 'folder/*.log'"
        )
    if notes is not None:
        notes += listing.notes
    return sources, listing.unwanted


def _kind_of(url: str) -> tuple[Kind | None, str]:
    suffixes = [suffix.lower() for suffix in Path(url).suffixes]
    compression = _COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes = suffixes[:-1]
    return (_KINDS.get(suffixes[-1]) if suffixes else None), compression


class SourceReader:
    """Reads one source once. After the last batch, ``sha256`` and ``bytes_read`` describe the file.

    Args:
        source: the file.
        text_field: of jsonl and parquet records.
        text_unit: what a document of a text file is.
        split_at: shares of the file, rising, at which a text file is cut into documents; ``text_unit`` is ``file``.

    Raises:
        DataError: anything that cannot be read or is not what its name promises, with the path and where in it.
    """

    def __init__(self, source: Source, text_field: str, text_unit: TextUnit, split_at: Sequence[float] = ()) -> None:
        self.source = source
        self.text_field = text_field
        self.text_unit = text_unit
        self.split_at = split_at
        self.compression = ""
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
                    yield from self._records(self._text(hashing))
                while hashing.read(BATCH_BYTES):
                    pass
                self.sha256 = hashing.sha256
        except DataError:
            raise
        except EOFError as error:
            raise DataError(
                f"{self.source.name}: cut off: ends in the middle of its {self.compression} stream"
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

    def _text(self, file: HashingFile) -> BinaryIO:
        """The decompressed text of a file, whose first bytes tell whether and how it is compressed."""
        raw = io.BufferedReader(file, BATCH_BYTES)
        self.compression = compression_of(raw.peek(HEAD_BYTES)[:HEAD_BYTES])
        if self.source.compression and self.compression != self.source.compression:
            holds = f"{self.compression} data" if self.compression else "something else"
            raise DataError(
                f"{self.source.name}: its name says {self.source.compression}, but it holds {holds}; "
                "copy it again, or give it the right name"
            )
        text = decompress(raw, self.compression)
        if why := why_not_text(text.peek(HEAD_BYTES)[:HEAD_BYTES]):
            raise DataError(f"{self.source.name}: {why}")
        return text

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
        if self.split_at:
            size, _ = self._measure()
            shares = (0.0, *self.split_at, 1.0)
            places = [(low + high) / 2 for low, high in itertools.pairwise(shares)]
            parts = [(int(high * size), place_digest(place)) for high, place in zip(shares[1:], places, strict=True)]
            yield from self._parts(stream, text, parts)
        elif len(text) <= WHOLE_FILE_BYTES:
            yield Batch(0, [text], [0])
        else:
            size, digest = self._measure()
            yield from self._parts(stream, text, [(size, digest)])

    def _parts(self, stream: BinaryIO, text: bytes, parts: list[tuple[int, bytes]]) -> Iterator[Batch]:
        """Documents that end about the given bytes of a file, of which ``text`` has been read, in small batches."""
        offset = 0
        for number, (end, digest) in enumerate(parts):
            last, start = number == len(parts) - 1, offset
            if end - start < (1 if last else _SMALLEST_PART):
                continue
            is_end = False
            while not is_end:
                if len(text) <= BATCH_BYTES:
                    text += stream.read(BATCH_BYTES)
                is_end = len(text) <= BATCH_BYTES if last else end - offset <= BATCH_BYTES
                cut = len(text) if is_end and last else last_safe_cut(text[: min(BATCH_BYTES, end - offset)])
                yield Batch(number, [text[:cut]], [offset], digest, continues=offset > start, open_end=not is_end)
                text, offset = text[cut:], offset + cut

    def _measure(self) -> tuple[int, bytes]:
        """Bytes and digest of a text file's decompressed content."""
        digest, size = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
        with self._open_raw() as raw:
            stream = decompress(io.BufferedReader(HashingFile(raw, lambda _: None), BATCH_BYTES), self.compression)
            while block := stream.read(BATCH_BYTES):
                digest.update(block)
                size += len(block)
        return size, digest.digest()

    def _parquet(self, raw: BinaryIO) -> Iterator[Batch]:
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise DataError(f"{self.source.name}: parquet needs pyarrow: pip install pyarrow") from error
        head = raw.read(HEAD_BYTES)
        if not head.startswith(b"PAR1"):
            why = why_not_text(head)
            raise DataError(f"{self.source.name}: its name says parquet, but it {why or 'holds something else'}")
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


def place_digest(share: float) -> bytes:
    """A digest for a document that is in a split by its place, a share from 0 to 1, and not by its bytes."""
    return int(share * 2**64).to_bytes(8, "big") + bytes(DIGEST_BYTES - 8)


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
