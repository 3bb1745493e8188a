"""Content decides what a file is, whatever its name says."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from darlit.__main__ import main
from darlit.data.content import compression_of, why_not_text
from darlit.data.errors import DataError
from darlit.data.prepare import Options, prepare
from darlit.data.sources import SourceReader, find_sources

TEXT = "".join(f"line {number} of a text, é 世界\n" for number in range(400)).encode()


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstd,
}
ENDINGS = {"gzip": ".gz", "bz2": ".bz2", "xz": ".xz", "zstd": ".zst"}


def read(path: Path) -> bytes:
    [source], _ = find_sources([str(path)])
    reader = SourceReader(source, "text", "line")
    texts = [text for batch in reader.batches() for text in batch.records]
    assert reader.bytes_read == path.stat().st_size
    return b"".join(texts)


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_texts_are_read_under_any_name(tmp_path: Path, kind: str) -> None:
    """Two frames, one after the other, with padding between them."""
    data = COMPRESS[kind](TEXT[:99]) + b"\0\0\0\0" + COMPRESS[kind](TEXT[99:])
    for name in (f"a.txt{ENDINGS[kind]}", "b.txt", "c.log"):
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == TEXT


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("frames", [1, 2])
def test_cut_compressed_files_are_found(tmp_path: Path, kind: str, frames: int) -> None:
    """Under the right name and under another one, in the first frame and in a later one."""
    whole = COMPRESS[kind](TEXT)
    for name in (f"a.txt{ENDINGS[kind]}", "b.txt"):
        (tmp_path / name).write_bytes(whole * (frames - 1) + whole[:-9])
        with pytest.raises(DataError, match=rf"{name}: cut off: ends in the middle of its {kind} stream"):
            read(tmp_path / name)


def tar(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", data)
    return buffer.getvalue()


def array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(10.0))
    return buffer.getvalue()


BINARY = {
    "UTF-16 with a mark": (TEXT.decode().encode("utf-16"), "UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8"),
    "UTF-16 without a mark": ("a short text".encode("utf-16-le"), "UTF-16LE text"),
    "UTF-16 of the other order": ("a short text".encode("utf-16-be"), "UTF-16BE text"),
    "UTF-32": (TEXT.decode().encode("utf-32"), "UTF-32 text"),
    "npy": (array(), "a NumPy array"),
    "zip": (zipped(TEXT), "a zip archive"),
    "tar": (tar(TEXT), "a tar archive"),
    "tar in gzip": (gzip.compress(tar(TEXT)), "a tar archive"),
    "gzip in gzip": (gzip.compress(gzip.compress(TEXT)), "gzip data where text was expected"),
    "PDF": (b"%PDF-1.7\n" + TEXT, "a PDF document"),
    "numbers": (np.arange(1000).tobytes(), "binary data"),
}


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.jsonl", "a.md"])
@pytest.mark.parametrize(("data", "what"), BINARY.values(), ids=BINARY)
def test_what_is_not_text_is_rejected(
    tmp_path: Path, name: str, data: bytes, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the path and what it is, by name and by glob; nothing is left of the attempt."""
    (tmp_path / name).write_bytes(data)
    for spec in (str(tmp_path / name), f"{tmp_path}/*"):
        assert main(["prepare", spec, "--out", str(tmp_path / "out" / "data")]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"{tmp_path / name}: is {what}" in line
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".data.lock"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.log"])
def test_parquet_under_another_name(tmp_path: Path, name: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"text": ["a", "b"]}), tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}: is a Parquet file, not text; give it a name that ends in \.parquet"):
        prepare([str(tmp_path / name)], tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt.gz", bz2.compress(TEXT), "its name says gzip, but it holds bz2 data"),
        ("a.txt.xz", TEXT, "its name says xz, but it holds something else"),
        ("a.txt.gz", b"", "its name says gzip, but it holds something else"),
        ("a.parquet", gzip.compress(TEXT), "its name says parquet, but it is gzip data"),
        ("a.parquet", TEXT, "its name says parquet, but it holds something else"),
    ],
)
def test_a_name_that_promises_something_else(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}: {message}"):
        prepare([str(tmp_path / name)], tmp_path / "out")


def test_texts_of_any_encoding_but_wide_ones_are_kept() -> None:
    for text in (
        TEXT,
        TEXT.decode().encode("gb18030"),
        "né à l'été".encode("latin-1"),
        b"",
        b"PK",
        b"BZh9 is text",
        b"a\0b",
    ):
        assert compression_of(text) == ""
        assert why_not_text(text) is None


def test_one_bad_file_does_not_lose_the_others(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(TEXT + b"%d" % number)
    (tmp_path / "7.txt").write_bytes(array())
    with pytest.raises(DataError, match=r"7\.txt: is a NumPy array"):
        prepare([f"{tmp_path}/*.txt"], tmp_path / "out", Options(val_fraction=0.4))
    assert len((tmp_path / "out.partial" / "progress.jsonl").read_text().splitlines()) == 7
