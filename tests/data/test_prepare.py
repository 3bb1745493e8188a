"""Preparation: what goes in comes out, byte for byte, and a folder is there whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from darlit.__main__ import main
from darlit.data import pipeline
from darlit.data.chunks import DOCUMENT_DTYPE, SplitWriter
from darlit.data.encode import SplitRule
from darlit.data.errors import DataError
from darlit.data.manifest import Manifest, open_manifest, partial_folder
from darlit.data.prepare import Options, prepare, prepare_default
from darlit.data.sources import document_digest

SCRIPTS = [
    "plain",
    "né à l'été",
    "русский текст",
    "中文字符",
    "हिन्दी",
    "עברית",
    "🙂👩‍👩‍👧",
    "a\r\nb\r\n",
    "\0NUL\0",
    "<|endoftext|>",
]


def stream(manifest: Manifest, split: str) -> np.ndarray:
    """All tokens of a split."""
    dtype = manifest.content["dtype"]
    chunks = manifest.split(split)["chunks"]
    paths = [manifest.folder / split / chunk["file"] for chunk in chunks]
    return np.concatenate([np.fromfile(path, dtype=dtype, offset=12) for path in paths])


def documents(manifest: Manifest) -> dict[tuple[str, int], bytes]:
    """Every document's text, decoded from the chunks, by source name and number."""
    tokenizer = manifest.tokenizer()
    found = {}
    for split in ("train", "val"):
        tokens = stream(manifest, split)
        table = np.fromfile(manifest.folder / split / "documents.bin", dtype=DOCUMENT_DTYPE)
        ends = np.flatnonzero(tokens == manifest.separator)
        assert len(ends) == len(table) == manifest.split(split)["documents"]
        for (start, source, number), end in zip(table.tolist(), ends.tolist(), strict=True):
            name = Path(manifest.content["sources"][source]["path"]).name
            found[name, number] = tokenizer.decode(tokens[start:end].tolist())
    return found


def same_folder(left: Manifest, right: Manifest) -> None:
    assert left.fingerprint == right.fingerprint
    names = {p.relative_to(left.folder) for p in left.folder.rglob("*") if p.is_file()}
    assert names == {p.relative_to(right.folder) for p in right.folder.rglob("*") if p.is_file()}
    for name in names:
        assert (left.folder / name).read_bytes() == (right.folder / name).read_bytes(), name


def write_texts(folder: Path, texts: list[bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_round_trip(tmp_path: Path, tokenizer: str) -> None:
    """Many scripts, empty documents, documents longer than a chunk, CRLF, NUL, a spelled-out special token."""
    texts = [text.encode() for text in SCRIPTS * 3] + [b"", b"", b"long " * 5000, "ü".encode() * 3000]
    write_texts(tmp_path / "in", texts)
    options = Options(tokenizer=tokenizer, vocab_size=400, chunk_tokens=1000, val_fraction=0.3)
    manifest = prepare([str(tmp_path / "in")], tmp_path / "out", options)
    assert documents(manifest) == {(f"{number:03}.txt", 0): text for number, text in enumerate(texts)}
    assert manifest.split("train")["bytes"] + manifest.split("val")["bytes"] == sum(map(len, texts))
    manifest.check_hashes()


def test_bytes_keep_invalid_utf8(tmp_path: Path) -> None:
    texts = [bytes(range(256)), b"\xff\xfe\x80", b"\xed\xa0\x80"] * 8
    write_texts(tmp_path / "in", texts)
    manifest = prepare([str(tmp_path / "in")], tmp_path / "out", Options(val_fraction=0.5))
    assert documents(manifest) == {(f"{number:03}.txt", 0): text for number, text in enumerate(texts)}


def test_bpe_reports_file_and_offset_of_invalid_utf8(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", [b"good text", b"bad \xff text"])
    with pytest.raises(DataError, match=r"001\.txt: byte 4: not UTF-8.*--tokenizer bytes"):
        prepare([str(tmp_path / "in")], tmp_path / "out", Options(tokenizer="bpe", vocab_size=300))
    assert not (tmp_path / "out").exists()


def large_vocabulary(path: Path) -> None:
    """A word-level tokenizer.json whose ids go beyond 65,535."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"w{number}": number for number in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel({**words, "[UNK]": 70_000}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(path))


def test_ids_above_65535(tmp_path: Path) -> None:
    large_vocabulary(tmp_path / "tokenizer.json")
    texts = [f"w{number} w{69_999 - number} w65536".encode() for number in range(20)]
    write_texts(tmp_path / "in", texts)
    options = Options(tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0.3)
    manifest = prepare([str(tmp_path / "in")], tmp_path / "out", options)
    assert (manifest.content["dtype"], manifest.vocab_size, manifest.separator) == ("uint32", 70_002, 70_001)
    assert documents(manifest) == {(f"{number:03}.txt", 0): text for number, text in enumerate(texts)}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_one_long_line_is_read_in_parts(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document longer than what is held in memory: same split, table and text as when read at once."""
    lines = [b"0123456789 some words in one line without an end " * 400, "世界é".encode() * 3000, b"x" * 9000, b"tail"]
    write_texts(tmp_path / "in", lines)
    options = Options(tokenizer=tokenizer, vocab_size=300, chunk_tokens=5000, val_fraction=0.4)
    whole = prepare([str(tmp_path / "in")], tmp_path / "whole", options)
    monkeypatch.setattr("darlit.data.sources.WHOLE_FILE_BYTES", 2000)
    monkeypatch.setattr("darlit.data.sources.BATCH_BYTES", 1000)
    parts = prepare([str(tmp_path / "in")], tmp_path / "parts", options, workers=3)
    assert documents(parts) == documents(whole) == {(f"{n:03}.txt", 0): text for n, text in enumerate(lines)}
    for split in ("train", "val"):
        assert parts.split(split)["documents"] == whole.split(split)["documents"]
    if tokenizer == "bytes":
        assert parts.fingerprint == whole.fingerprint


def test_split_depends_on_the_text_alone(tmp_path: Path) -> None:
    texts = [f"document {number}".encode() for number in range(40)]
    write_texts(tmp_path / "few", texts[:20])
    write_texts(tmp_path / "many", [b"first of all", *texts])
    rule = SplitRule(0.3)
    options = Options(val_fraction=0.3)
    for name in ("few", "many"):
        manifest = prepare([str(tmp_path / name)], tmp_path / f"out_{name}", options)
        validation = stream(manifest, "val")
        pieces = np.split(validation, np.flatnonzero(validation == 256) + 1)[:-1]
        texts_of_val = {bytes(piece[:-1].tolist()) for piece in pieces}
        expected = texts[:20] if name == "few" else texts
        assert texts_of_val >= {text for text in expected if rule.split_of(document_digest(text)) == "val"}
        assert not texts_of_val & {text for text in expected if rule.split_of(document_digest(text)) == "train"}


def test_split_share(tmp_path: Path) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(5000))
    (tmp_path / "in.txt").write_bytes(lines)
    manifest = prepare([str(tmp_path / "in.txt")], tmp_path / "out", Options(text_unit="line", val_fraction=0.1))
    assert manifest.split("train")["documents"] + manifest.split("val")["documents"] == 5000
    assert 400 < manifest.split("val")["documents"] < 600


def test_paragraphs_and_lines_keep_their_ends(tmp_path: Path) -> None:
    text = b"\n\none\ntwo\n\n \nthree\r\n\r\nfour"
    (tmp_path / "in.txt").write_bytes(text * 30)
    for unit in ("paragraph", "line"):
        manifest = prepare([str(tmp_path / "in.txt")], tmp_path / unit, Options(text_unit=unit, val_fraction=0.3))
        found = documents(manifest)
        assert b"".join(found["in.txt", number] for number in range(len(found))) == text * 30
    assert found["in.txt", 2] == b"one\n"


def test_duplicates_are_dropped_but_the_first(tmp_path: Path) -> None:
    texts = [b"same", b"one", b"same", b"two", b"one", b"same", *(b"other %d" % n for n in range(30))]
    write_texts(tmp_path / "in", texts)
    manifest = prepare([str(tmp_path / "in")], tmp_path / "out", Options(deduplicate=True, val_fraction=0.3))
    found = documents(manifest)
    assert sorted(found.values()) == sorted(set(texts))
    assert ("000.txt", 0) in found
    assert ("002.txt", 0) not in found


def test_long_duplicate_is_dropped_in_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darlit.data.sources.WHOLE_FILE_BYTES", 2000)
    monkeypatch.setattr("darlit.data.sources.BATCH_BYTES", 1000)
    texts = [b"long document " * 500, b"long document " * 500, *(b"other %d" % n for n in range(20))]
    write_texts(tmp_path / "in", texts)
    manifest = prepare([str(tmp_path / "in")], tmp_path / "out", Options(deduplicate=True, val_fraction=0.3))
    assert sorted(documents(manifest).values()) == sorted(set(texts))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Sources of all kinds, with duplicates between them."""
    folder = tmp_path / "many"
    write_texts(folder, [f"text {number} ".encode() * (1 + number % 7 * 40) for number in range(40)])
    rows = [json.dumps({"text": f"record {number % 50} é", "id": number}) for number in range(300)]
    (folder / "a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    with gzip.open(folder / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(rows[:100]) + "\n")
    return folder


OPTIONS = Options(chunk_tokens=700, val_fraction=0.3, deduplicate=True)


def test_workers_change_nothing(tmp_path: Path, many: Path) -> None:
    one = prepare([str(many)], tmp_path / "one", OPTIONS, workers=1)
    same_folder(one, prepare([str(many)], tmp_path / "four", OPTIONS, workers=4))


class StopError(BaseException):
    """An interruption that no code catches, as a signal would be."""


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Interrupt the next preparation at its n-th write."""
    original = SplitWriter.write

    def arm(writes: int) -> None:
        count = iter(range(writes))

        def write(self: SplitWriter, *arguments: object) -> None:
            original(self, *arguments)  # type: ignore[arg-type]
            if next(count, None) is None:
                raise StopError

        monkeypatch.setattr(SplitWriter, "write", write)

    yield arm
    monkeypatch.setattr(SplitWriter, "write", original)


@pytest.mark.parametrize("options", [OPTIONS, Options(tokenizer="bpe", vocab_size=300, chunk_tokens=300)])
def test_interrupted_anywhere_goes_on(
    tmp_path: Path, many: Path, stop_after: Callable[[int], None], options: Options
) -> None:
    """Nothing opens after an interruption; typed again, the result is the uninterrupted one, to the byte."""
    straight = prepare([str(many)], tmp_path / "straight", options)
    out = tmp_path / "out"
    attempts = 0
    while not out.exists():
        stop_after(9)
        try:
            prepare([str(many)], out, options, workers=1 + attempts % 2)
        except StopError:
            attempts += 1
            assert not out.exists()
            with pytest.raises(DataError, match="interrupted; type the same"):
                open_manifest(out)
            with pytest.raises(DataError, match="not a prepared data folder"):
                open_manifest(partial_folder(out))
    assert attempts > 3
    same_folder(straight, open_manifest(out))
    assert not partial_folder(out).exists()


def test_finished_sources_are_not_read_again(
    tmp_path: Path, many: Path, stop_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(20)
    with pytest.raises(StopError):
        prepare([str(many)], tmp_path / "out", OPTIONS)
    lines = (partial_folder(tmp_path / "out") / "progress.jsonl").read_text().splitlines()
    done = {json.loads(line)["path"] for line in lines}
    stop_after(10**9)
    opened: list[str] = []
    original = pipeline.SourceReader.batches
    monkeypatch.setattr(
        pipeline.SourceReader, "batches", lambda self: opened.append(self.source.name) or original(self)
    )
    prepare([str(many)], tmp_path / "out", OPTIONS)
    assert len(done) > 5
    assert not done & set(opened)


def test_another_plan_does_not_mix_with_an_unfinished_one(
    tmp_path: Path, many: Path, stop_after: Callable[[int], None]
) -> None:
    out = tmp_path / "out"
    stop_after(20)
    with pytest.raises(StopError):
        prepare([str(many)], out, OPTIONS)
    stop_after(10**9)
    other = Options(val_fraction=0.5)
    with pytest.raises(DataError, match=r"unfinished preparation with other options.*--overwrite"):
        prepare([str(many)], out, other)
    assert prepare([str(many)], out, other, existing="overwrite").content["options"]["val_fraction"] == 0.5


def test_target_that_exists(tmp_path: Path, many: Path, stop_after: Callable[[int], None]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    first = prepare([str(many)], out, OPTIONS)  # an empty folder is fine
    with pytest.raises(DataError, match=r"exists and is not empty; .*--overwrite"):
        prepare([str(many)], out, OPTIONS)
    stop_after(5)
    with pytest.raises(StopError):
        prepare([str(many)], out, Options(), existing="overwrite")
    assert open_manifest(out).fingerprint == first.fingerprint  # the old one stays until the new one is whole
    stop_after(10**9)
    second = prepare([str(many)], out, Options(), existing="overwrite")
    assert open_manifest(out).fingerprint == second.fingerprint != first.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "many", "out"]


def test_disk_full_keeps_what_is_done(tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full stands for the disk: every write to it fails as on a full one."""
    out = tmp_path / "out"
    opened = 0
    original = SplitWriter._open_chunk

    def open_chunk(self: SplitWriter):  # type: ignore[no-untyped-def]
        nonlocal opened
        opened += 1
        return Path("/dev/full").open("wb") if opened == 12 else original(self)

    monkeypatch.setattr(SplitWriter, "_open_chunk", open_chunk)
    with pytest.raises(DataError, match=r"No space left on device.*what is done is kept"):
        prepare([str(many)], out, OPTIONS)
    assert not out.exists()
    assert len((partial_folder(out) / "progress.jsonl").read_text().splitlines()) > 3
    same_folder(prepare([str(many)], out, OPTIONS), prepare([str(many)], tmp_path / "straight", OPTIONS))


def test_a_disk_that_loses_writes_is_noticed(tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SplitWriter.finish

    def finish(self: SplitWriter):  # type: ignore[no-untyped-def]
        chunks = original(self)
        with (self.folder / chunks[0]["file"]).open("r+b") as file:
            file.seek(100)
            file.write(b"\xff" * 50)
        return chunks

    monkeypatch.setattr(SplitWriter, "finish", finish)
    with pytest.raises(DataError, match=r"chunk-0-0\.bin: reads back differently"):
        prepare([str(many)], tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()


PROGRAM = """
import sys
from darlit.data.prepare import Options, prepare, prepare_default
{body}
"""


def start(body: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_share_one_cache(tmp_path: Path) -> None:
    """Runs that start at once all get the same, whole default corpus, and one of them makes it."""
    body = "folder = prepare_default(show_progress=True)\nprint(folder)"
    runs = [start(body, DARLIT_CACHE=str(tmp_path)) for _ in range(3)]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], outputs
    assert len({stdout for stdout, _ in outputs}) == 1
    assert sum("MB/s" in stderr for _, stderr in outputs) == 1
    open_manifest(outputs[0][0].strip()).check_hashes()


def test_a_second_prepare_of_the_same_target_is_refused(tmp_path: Path, many: Path) -> None:
    from filelock import FileLock

    with FileLock(tmp_path / ".out.lock"), pytest.raises(DataError, match="another darlit prepare is writing it"):
        prepare([str(many)], tmp_path / "out", OPTIONS)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_killed_process_leaves_nothing_that_opens(tmp_path: Path, signal_number: int) -> None:
    """Killed in the middle, by any signal; the same command typed again gives the uninterrupted result."""
    source = tmp_path / "in"
    write_texts(source, [b"some text of a document\n" * 4000] * 10 + [b"%d" % n for n in range(40)])
    slow = (
        # What a shell runs in the background ignores SIGINT, and so do its children.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from darlit.data.chunks import SplitWriter\nimport time\n"
        "write = SplitWriter.write\n"
        "SplitWriter.write = lambda self, *a: (time.sleep(0.05), print('.', flush=True), write(self, *a))\n"
    )
    call = f"prepare([{str(source)!r}], {str(tmp_path / 'out')!r}, Options(val_fraction=0.3), workers=2)"
    run = start(slow + call)
    assert run.stdout is not None
    for _ in range(12):
        run.stdout.readline()
    run.send_signal(signal_number)
    run.communicate(timeout=30)
    assert run.returncode != 0
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError):
        open_manifest(tmp_path / "out.partial")
    again = prepare([str(source)], tmp_path / "out", Options(val_fraction=0.3))
    same_folder(again, prepare([str(source)], tmp_path / "straight", Options(val_fraction=0.3)))


def test_default_corpus() -> None:
    began = time.perf_counter()
    folder = prepare_default()
    manifest = open_manifest(folder)
    names = [source["path"] for source in manifest.content["sources"]]
    assert "python-stdlib/argparse.py" in names
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert all(len(source["sha256"]) == 64 and source["bytes"] >= 0 for source in manifest.content["sources"])
    assert "PSF-2.0" in manifest.content["licence"]
    assert manifest.split("train")["tokens"] > 5_000_000
    assert manifest.split("val")["tokens"] > 100_000
    assert prepare_default() == folder
    assert time.perf_counter() - began < 600  # a hang, not a speed


def test_default_corpus_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb without sources makes what fit would make; other options need a folder of their own."""
    monkeypatch.setenv("DARLIT_CACHE", str(tmp_path))
    assert main(["prepare"]) == 0
    assert str(prepare_default()) in capsys.readouterr().out
    assert main(["prepare"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    for options in (["--val-fraction", "0.2"], ["--tokenizer", "gpt2"], ["--vocab-size", "300"]):
        assert main(["prepare", *options]) == 2
        assert "--out FOLDER is required" in capsys.readouterr().err


def test_import_prepares_nothing(tmp_path: Path) -> None:
    code = "import darlit.data, darlit.data.prepare, sys; print([m for m in ('torch', 'litdata') if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "DARLIT_CACHE": str(tmp_path)}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []
