"""Damage that no hash was read for: manifests and indexes under ``sizes``, and chunks that change during a run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from darlit.__main__ import main
from darlit.data.datamodule import TokenDataModule
from darlit.data.errors import DataError
from darlit.data.manifest import Manifest, open_manifest
from data.test_damage import start


@pytest.fixture
def folder(prepared: Manifest, tmp_path: Path) -> Path:
    shutil.copytree(prepared.folder, tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("content", [b"", b"{", b'{"chunks": []}', b"\xff" * 40])
def test_a_damaged_index_is_found_without_hashes(folder: Path, content: bytes) -> None:
    """Padded to the size that the manifest says, too."""
    path = folder / "train" / "index.json"
    size = path.stat().st_size
    for damaged in (content, content.ljust(size)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{path}: damaged"):
            start(folder, verify="sizes")


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A manifest with a hash of its own that fits: made by another program, or edited by hand."""
    content = json.loads((folder / "manifest.json").read_bytes())
    content = change(content) or content
    raw = json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(raw)
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(raw).hexdigest()}  manifest.json\n")


MALFORMED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda content: [content],
    "no splits": lambda content: content.pop("splits") and None,
    "no val": lambda content: content["splits"].pop("val") and None,
    "splits of text": lambda content: content.update(splits={"train": "x", "val": "y"}),
    "no chunks": lambda content: content["splits"]["train"].update(chunks=[]),
    "no tokenizer": lambda content: content.pop("tokenizer") and None,
    "no vocabulary": lambda content: content["tokenizer"].pop("vocab_size") and None,
    "no files": lambda content: content.update(files={}),
    "no size": lambda content: content["files"]["train/index.json"].pop("bytes") and None,
    "no fingerprint": lambda content: content.pop("fingerprint") and None,
    "another fingerprint": lambda content: content.update(fingerprint="0" * 64),
    "another vocabulary": lambda content: content["tokenizer"].update(vocab_size=100),
    "another range": lambda content: content["splits"]["train"]["chunks"][0].update(tokens=999),
    "no sources": lambda content: content.pop("sources") and None,
    "no versions": lambda content: content.update(versions=None),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_manifest(
    folder: Path, change: Callable[[dict[str, Any]], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, for training and for a look at the folder; every key alone missing is found too."""
    rewrite(folder, change)
    with pytest.raises(DataError, match=r"manifest\.json: malformed: "):
        start(folder, verify="sizes")
    for action in ("info", "verify"):
        assert main(["data", action, str(folder)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_manifest_that_is_not_json(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"{")
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(b'{').hexdigest()}  manifest.json\n")
    with pytest.raises(DataError, match=r"manifest\.json: malformed: Expecting property name"):
        open_manifest(folder)


def module(folder: Path, **options: Any) -> TokenDataModule:
    data = TokenDataModule(str(folder), sequence_length=32, batch_size=2, verify="sizes", **options)
    data.prepare_data()
    data.setup("fit")
    return data


def cut(path: Path) -> None:
    os.truncate(path, 200)


def overwrite(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:500] + bytes(len(raw) - 500))
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [(cut, "changed while it was in use"), (overwrite, "changed while it was in use"), (Path.unlink, "cannot be read")],
)
def test_a_chunk_that_changes_during_a_run(
    folder: Path, workers: int, change: Callable[[Path], None], message: str
) -> None:
    """One line and no bus error, although the chunk is mapped into memory; from worker processes too."""
    data = module(folder, num_workers=workers)
    batches = iter(data.train_dataloader())
    next(batches)
    for path in (folder / "train").glob("chunk-*"):
        change(path)
    with pytest.raises(DataError, match=rf"^{folder}/train/chunk-0-\d+\.bin: {message}.*resume the run$") as error:
        for _ in batches:
            pass
    assert "\n" not in str(error.value)


def test_ids_beyond_the_vocabulary(folder: Path) -> None:
    """Of the right size, so that only reading finds them."""
    path = folder / "val" / "chunk-0-0.bin"
    tokens = np.memmap(path, dtype="uint16", mode="r+", offset=12)
    tokens[:] = 700
    tokens.flush()
    with pytest.raises(
        DataError, match=f"{path}: damaged: token id 700 in a vocabulary of 257; type: darlit data verify"
    ):
        list(module(folder).val_dataloader())
