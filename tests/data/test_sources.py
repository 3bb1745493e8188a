"""Sources of every kind, local and on fsspec file systems, and every way in which they can be bad."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from darlit.__main__ import main
from darlit.data.errors import DataError
from darlit.data.manifest import partial_folder
from darlit.data.prepare import Options, prepare
from darlit.data.sources import Batch, Source, SourceReader, find_sources, parse_json_lines

TEXTS = [f"text {number} é 世界" for number in range(25)]


def lines(field: str = "text") -> bytes:
    return "".join(
        json.dumps({field: text, "id": n}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(TEXTS)
    ).encode()


def write_parquet(path: Path, **columns: list[object]) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=10)


def compress_zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(data))


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.jsonl": lambda path: path.write_bytes(lines()) and None,
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines()[:400]) + gzip.compress(lines()[400:])) and None,
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(lines())) and None,
    "a.jsonl.zst": lambda path: path.write_bytes(compress_zstd(lines()[:99]) + compress_zstd(lines()[99:])) and None,
    "a.parquet": lambda path: write_parquet(path, text=list(TEXTS), id=list(range(25))),
    "a.txt": lambda path: path.write_bytes("\n".join(TEXTS).encode()) and None,
    "a.txt.gz": lambda path: path.write_bytes(gzip.compress("\n".join(TEXTS).encode())) and None,
    "a.txt.zst": lambda path: path.write_bytes(compress_zstd("\n".join(TEXTS).encode())) and None,
}


def read(source: Source, text_field: str = "text") -> list[bytes]:
    reader = SourceReader(source, text_field, "line")
    found = []
    for batch in reader.batches():
        if source.kind == "jsonl":
            found += parse_json_lines(batch, source, text_field)[1]
        else:
            found += batch.records
    assert len(reader.sha256) == 64
    assert reader.bytes_read == source.size
    return [text.rstrip(b"\n") for text in found]


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_gives_the_same_texts(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    [source], left_out = find_sources([str(tmp_path / name)])
    assert read(source) == [text.encode() for text in TEXTS]
    assert left_out == 0


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.txt"])
def test_the_hash_is_the_files(tmp_path: Path, name: str) -> None:
    import hashlib

    WRITERS[name](tmp_path / name)
    [source], _ = find_sources([str(tmp_path / name)])
    reader = SourceReader(source, "text", "file")
    list(reader.batches())
    assert reader.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_fsspec_urls(tmp_path: Path) -> None:
    """A memory file system stands for s3, gs and hf; file:// is the local one."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/sub/b.jsonl", lines())
    memory.pipe("/corpus/a.txt", b"one text")
    memory.pipe("/corpus/.hidden/c.txt", b"not this")
    try:
        found, _ = find_sources(["memory://corpus"])
        assert [source.url for source in found] == ["memory:///corpus/a.txt", "memory:///corpus/sub/b.jsonl"]
        [one], _ = find_sources(["memory://corpus/**/*.jsonl"])
        assert read(one) == [text.encode() for text in TEXTS]
        manifest = prepare(["memory://corpus"], tmp_path / "out", Options(val_fraction=0.3))
        assert manifest.content["sources"][1]["path"] == "memory:///corpus/sub/b.jsonl"
        assert manifest.split("train")["documents"] + manifest.split("val")["documents"] == 26
    finally:
        memory.rm("/corpus", recursive=True)
    (tmp_path / "a.txt").write_bytes(b"local")
    [local], _ = find_sources([f"file://{tmp_path}/a.txt"])
    assert read(local) == [b"local"]


def test_folders_globs_and_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "sub/c.md", "d.png", "e.log", ".git/f.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}")
    found, left_out = find_sources([str(tmp_path)])
    assert [Path(source.url).name for source in found] == ["a.jsonl", "b.txt", "c.md"]
    assert left_out == 2
    found, left_out = find_sources([f"{tmp_path}/*.log", f"{tmp_path}/b.txt", f"{tmp_path}/*.txt"])
    assert [Path(source.url).name for source in found] == ["b.txt", "e.log"]
    assert left_out == 0


def test_text_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("content"))
    [source], _ = find_sources([str(tmp_path / "a.jsonl")])
    assert read(source, "content") == [text.encode() for text in TEXTS]


def test_lone_surrogates_of_json_are_kept_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n')
    [source], _ = find_sources([str(tmp_path / "a.jsonl")])
    assert read(source) == [b"a\xed\xa0\x80b"]


def jsonl(*rows: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(b"\n".join(rows)) and None


def half(write: Callable[[Path], None]) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        write(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])

    return cut


BAD = {
    "missing field": (
        "a.jsonl",
        jsonl(b'{"text": "x"}', b'{"body": "y"}'),
        [],
        r"a\.jsonl: line 2: no field 'text'; it has body.*--text-field",
    ),
    "not an object": ("a.jsonl", jsonl(b"[1, 2]"), [], r"a\.jsonl: line 1: no field 'text'; it has a list"),
    "wrong type": ("a.jsonl", jsonl(b"", b'{"text": 3}'), [], r"a\.jsonl: line 2: field 'text' is int, not text"),
    "null": ("a.jsonl", jsonl(b'{"text": null}'), [], r"a\.jsonl: line 1: field 'text' is NoneType, not text"),
    "not JSON": ("a.jsonl", jsonl(b'{"text": "x"}', b'{"text": "x'), [], r"a\.jsonl: line 2: not JSON"),
    "not UTF-8": ("a.jsonl", jsonl(b'{"text": "\xff"}'), [], r"a\.jsonl: line 1: not JSON"),
    "half a gzip": ("a.jsonl.gz", half(WRITERS["a.jsonl.gz"]), [], r"a\.jsonl\.gz: cut off.*gzip"),
    "no gzip": ("a.jsonl.gz", jsonl(b'{"text": "x"}'), [], r"a\.jsonl\.gz: its name says gzip, but it holds something"),
    "half a zstd": ("a.jsonl.zst", half(WRITERS["a.jsonl.zst"]), [], r"a\.jsonl\.zst: cut off.*zstd"),
    "no zstd": ("a.txt.zst", jsonl(b"plain text"), [], r"a\.txt\.zst: its name says zstd, but it holds something"),
    "half a parquet": ("a.parquet", half(WRITERS["a.parquet"]), [], r"a\.parquet: cannot be read"),
    "parquet field": (
        "a.parquet",
        WRITERS["a.parquet"],
        ["--text-field", "body"],
        r"a\.parquet: no field 'body'; it has text, id",
    ),
    "parquet type": (
        "a.parquet",
        WRITERS["a.parquet"],
        ["--text-field", "id"],
        r"a\.parquet: field 'id' is int64, not text",
    ),
    "parquet null": (
        "a.parquet",
        lambda path: write_parquet(path, text=["a", None]),
        [],
        r"a\.parquet: row 1: field 'text' is null",
    ),
    "zero documents": ("a.jsonl", jsonl(b"", b"  "), [], "no document of 0 fell into the train split"),
    "one document": (
        "a.txt",
        jsonl(b"all in one"),
        [],
        r"no document of 1 fell into the (train|val) split.*--text-unit",
    ),
    "no such file": ("a.txt", lambda path: None, [], r"a\.txt: no such file or folder"),
    "tokenizer missing": (
        "a.txt",
        jsonl(b"x"),
        ["--tokenizer", "./no.json"],
        r"tokenizer file \./no\.json does not exist",
    ),
    "val fraction": ("a.txt", jsonl(b"x"), ["--val-fraction", "1.5"], "val_fraction 1.5 is not between 0 and 1"),
    "val start": ("a.txt", jsonl(b"x"), ["--val-start", "0.95"], "val_start 0.95 leaves nothing to train on"),
    "small vocabulary": (
        "a.txt",
        jsonl(b"x"),
        ["--tokenizer", "bpe", "--vocab-size", "100"],
        "vocab_size 100 is too small",
    ),
    "chunk tokens": ("a.txt", jsonl(b"x"), ["--chunk-tokens", "1"], "chunk_tokens 1 is too small"),
    "workers": ("a.txt", jsonl(b"x"), ["--workers", "0"], "workers 0 must be at least 1"),
}


@pytest.mark.parametrize(("name", "write", "options", "message"), BAD.values(), ids=BAD)
def test_bad_input(
    tmp_path: Path,
    name: str,
    write: Callable[[Path], None],
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with the path, exit status 2, and nothing that opens."""
    import re

    write(tmp_path / name)
    out = tmp_path / "out"
    assert main(["prepare", str(tmp_path / name), "--out", str(out), *options]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert len(error.strip().splitlines()) == 1
    assert not out.exists()
    assert not (partial_folder(out) / "manifest.json").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions_as_a_user(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: .*Permission denied"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out")


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, where the tests run as root: the system call itself is made to refuse."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"x")
    real = open

    def refuse(file, *arguments, **options):  # type: ignore[no-untyped-def]
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *arguments, **options)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: .*Permission denied"):
        prepare([str(path)], tmp_path / "out")


def test_target_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "a.txt").write_bytes(b"x")
    with pytest.raises(DataError, match=r"file.*(Not a directory|File exists)"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "file" / "out")


def test_bad_input_keeps_the_finished_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend the bad file and type the same again: what was done is not done again."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.jsonl").write_bytes(lines())
    (folder / "5.jsonl").write_bytes(lines()[:-10])
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"5\.jsonl: line 25: not JSON"):
        prepare([str(folder)], out, Options(val_fraction=0.3))
    progress = (partial_folder(out) / "progress.jsonl").read_text().splitlines()
    assert len(progress) == 5
    (folder / "5.jsonl").write_bytes(lines())
    read_again: list[str] = []
    original = SourceReader.batches

    def batches(self: SourceReader) -> Iterator[Batch]:
        read_again.append(Path(self.source.url).name)
        return original(self)

    monkeypatch.setattr(SourceReader, "batches", batches)
    manifest = prepare([str(folder)], out, Options(val_fraction=0.3))
    assert read_again == [f"{number}.jsonl" for number in range(5, 10)]
    straight = prepare([str(folder)], tmp_path / "straight", Options(val_fraction=0.3))
    assert manifest.fingerprint == straight.fingerprint


def test_a_finished_source_that_changed_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.jsonl").write_bytes(lines())
    (folder / "4.jsonl").write_bytes(b"{")
    with pytest.raises(DataError, match=r"4\.jsonl: line 1: not JSON"):
        prepare([str(folder)], tmp_path / "out", Options(val_fraction=0.3))
    (folder / "4.jsonl").write_bytes(lines())
    (folder / "1.jsonl").write_bytes(lines() * 2)
    manifest = prepare([str(folder)], tmp_path / "out", Options(val_fraction=0.3))
    straight = prepare([str(folder)], tmp_path / "straight", Options(val_fraction=0.3))
    assert manifest.content["files"] == straight.content["files"]
