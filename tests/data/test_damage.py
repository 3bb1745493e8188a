"""Damage to a prepared folder is found before training, with the path of what is damaged."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from darlit.__main__ import main
from darlit.data.datamodule import TokenDataModule
from darlit.data.errors import DataError
from darlit.data.inspect import main as inspect_main
from darlit.data.manifest import Manifest, open_manifest
from darlit.data.verification import verify


@pytest.fixture
def folder(prepared: Manifest, tmp_path: Path) -> Path:
    """A copy that was verified before, so that only changes are hashed again."""
    shutil.copytree(prepared.folder, tmp_path / "data")
    start(tmp_path / "data")
    return tmp_path / "data"


def start(folder: Path, **options: object) -> None:
    """What fit does with the data before its first step."""
    module = TokenDataModule(folder=str(folder), sequence_length=32, batch_size=2, **options)  # type: ignore[arg-type]
    module.prepare_data()
    module.setup("fit")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_200_random_byte_flips(folder: Path) -> None:
    """In chunks, indexes, document tables, the manifest and its hash, each file as likely as the others."""
    generator = random.Random(0)
    for _ in range(200):
        path = generator.choice(files(folder))
        whole = path.read_bytes()
        place, flip = generator.randrange(len(whole)), generator.randrange(1, 256)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        named = path.with_suffix(".json") if path.name == "manifest.sha256" else path
        with pytest.raises(DataError, match=f"{named}: damaged"):
            start(folder)
        path.write_bytes(whole)
    start(folder)


@pytest.mark.parametrize("size", [0, 1, -1])
def test_cut_files(folder: Path, size: int) -> None:
    for path in files(folder):
        whole = path.read_bytes()
        path.write_bytes(whole[:size])
        named = path.with_suffix(".json") if path.name == "manifest.sha256" else path
        with pytest.raises(DataError, match=f"{named}: damaged"):
            start(folder)
        path.write_bytes(whole)


def test_missing_files(folder: Path) -> None:
    for path in files(folder):
        path.rename(folder.parent / "aside")
        with pytest.raises(DataError, match=f"{path}: missing"):
            start(folder)
        (folder.parent / "aside").rename(path)


def test_swapped_files(folder: Path) -> None:
    """Two whole chunks of the same size under each other's names."""
    one, other = folder / "train" / "chunk-0-0.bin", folder / "train" / "chunk-0-1.bin"
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    with pytest.raises(DataError, match=f"{one}: damaged: its sha256 differs"):
        start(folder)


def test_a_manifest_of_another_folder(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "manifest.json").read_bytes())
    content["splits"]["train"]["tokens"] += 1
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        start(folder)


def test_hashes_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """first_use hashes a folder once, always every time, sizes never."""
    hashed: list[Path] = []
    original = Manifest.check_hashes

    def check(self: Manifest, *arguments: object) -> None:
        hashed.append(self.folder)
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Manifest, "check_hashes", check)
    start(folder)
    assert hashed == []
    start(folder, verify="always")
    assert hashed == [folder]
    shutil.copytree(folder, folder.parent / "copy")
    start(folder.parent / "copy")
    start(folder.parent / "copy")
    assert hashed == [folder, folder.parent / "copy"]
    (folder / "train" / "chunk-0-0.bin").touch()
    start(folder, verify="sizes")
    assert len(hashed) == 2
    start(folder)
    assert len(hashed) == 3


def test_a_cache_that_cannot_be_written_still_verifies(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("DARLIT_CACHE", str(tmp_path / "file" / "cache"))
    verify(open_manifest(folder), "first_use")
    chunk = folder / "val" / "chunk-0-0.bin"
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    with pytest.raises(DataError, match="damaged"):
        verify(open_manifest(folder), "first_use")


def test_verify_verb(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_main(["verify", str(folder)]) == 0
    assert "whole" in capsys.readouterr().out
    chunk = folder / "val" / "chunk-0-0.bin"
    raw = bytearray(chunk.read_bytes())
    raw[20] ^= 1
    chunk.write_bytes(raw)
    with pytest.raises(DataError, match=f"{chunk}: damaged"):
        inspect_main(["verify", str(folder)])


def test_info_verb(folder: Path, prepared: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_main(["info", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert prepared.fingerprint in shown
    assert "bytes, vocabulary 257" in shown
    assert f"{prepared.split('train')['tokens']:,} tokens" in shown


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "does not exist; type: darlit prepare SOURCE --out"),
        (lambda folder: folder.mkdir(), r"not a prepared data folder \(no manifest\.json\); type: darlit prepare"),
        (lambda folder: folder.write_bytes(b""), "is a file; type: darlit prepare"),
    ],
)
def test_folders_that_are_not_data(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "data")
    with pytest.raises(DataError, match=message):
        start(tmp_path / "data")


def test_one_split_of_a_folder(folder: Path) -> None:
    with pytest.raises(DataError, match=f"is one split of a prepared folder; give {folder}$"):
        start(folder / "train")


def test_chunks_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that litdata wrote without TokensLoader: the error says what to do instead."""
    monkeypatch.setenv("LITDATA_DISABLE_VERSION_CHECK", "1")
    import numpy as np
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(tmp_path / "data"), chunk_size=10)
    writer.add_item(0, {"tokens": np.arange(5)})
    writer.done()
    writer.merge()
    with pytest.raises(DataError, match=r"written with PyTreeLoader.*TokensLoader.*darlit prepare SOURCE --out NEW"):
        start(tmp_path / "data")


def test_the_command_line_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(tmp_path / "no"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert str(tmp_path / "no") in error
