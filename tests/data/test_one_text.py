"""One text alone is split within itself, and an attempt that wrote nothing binds nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from darlit.__main__ import main
from darlit.data import sources
from darlit.data.errors import DataError
from darlit.data.manifest import Manifest, partial_folder
from darlit.data.prepare import Options, prepare
from data.test_prepare import stream

TEXT = "".join(f"Sentence {number} of a long book, né à l'été.\n" for number in range(3000)).encode()


def text_of(manifest: Manifest, split: str) -> bytes:
    return manifest.tokenizer().decode(stream(manifest, split).tolist())


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ["book.txt", "book.txt.gz"])
def test_the_head_is_validation_and_the_rest_training(
    tmp_path: Path, name: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at a line; the same however much is read at a time and however many threads there are."""
    if large:
        monkeypatch.setattr(sources, "WHOLE_FILE_BYTES", 20_000)
        monkeypatch.setattr(sources, "BATCH_BYTES", 5_000)
    (tmp_path / name).write_bytes(gzip.compress(TEXT) if name.endswith(".gz") else TEXT)
    manifest = prepare([str(tmp_path / name)], tmp_path / "out", workers=3)
    validation, training = text_of(manifest, "val"), text_of(manifest, "train")
    assert validation + training == TEXT
    assert validation.endswith(b"\n")
    assert abs(len(validation) - 0.05 * len(TEXT)) < 100
    assert [manifest.split(split)["documents"] for split in ("train", "val")] == [1, 1]
    assert manifest.content["split_rule"] == "val is the text from 0.0 to 0.05 of its length"
    manifest.check_hashes()


def test_a_share_that_neither_split_sees(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(TEXT)
    first = prepare([str(tmp_path / "book.txt")], tmp_path / "first", Options(val_fraction=0.1))
    second = prepare([str(tmp_path / "book.txt")], tmp_path / "second", Options(val_fraction=0.1, val_start=0.1))
    assert text_of(first, "val") + text_of(second, "val") + text_of(second, "train") == TEXT
    assert text_of(second, "val") not in text_of(first, "val")


def test_bpe_of_one_text_is_trained_on_the_training_part(tmp_path: Path) -> None:
    """A word that only the validation part has gets no token of its own."""
    head = b"Xylophagous " * 300
    (tmp_path / "book.txt").write_bytes(head + b"\n" + TEXT)
    options = Options(tokenizer="bpe", vocab_size=400, val_fraction=len(head) / (len(head) + len(TEXT)))
    manifest = prepare([str(tmp_path / "book.txt")], tmp_path / "out", options)
    assert text_of(manifest, "val") + text_of(manifest, "train") == head + b"\n" + TEXT
    vocabulary = json.loads((manifest.folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert not any("Xyl" in token for token in vocabulary)
    assert any("ntence" in token for token in vocabulary)


def test_several_texts_are_split_by_document(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_bytes(TEXT[number * 100 :])
    manifest = prepare([f"{tmp_path}/*.txt"], tmp_path / "out", Options(val_fraction=0.3))
    assert manifest.split("train")["documents"] + manifest.split("val")["documents"] == 20


def test_the_option_that_the_error_names_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong field: nothing was written, so the retry is another preparation."""
    lines = "".join(json.dumps({"body": f"document {number}"}) + "\n" for number in range(50))
    (tmp_path / "a.jsonl").write_text(lines)
    arguments = ["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "no field 'text'; it has body: choose with --text-field" in capsys.readouterr().err
    assert not partial_folder(tmp_path / "out").exists()
    assert main([*arguments, "--text-field", "body"]) == 0


def test_a_split_without_documents_binds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one source was finished, but never can be with these options."""
    (tmp_path / "a.txt").write_text("all in one\n" * 2)
    arguments = ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "no document of 1 fell into the val split" in capsys.readouterr().err
    assert not partial_folder(tmp_path / "out").exists()
    assert main([*arguments, "--val-fraction", "0.5"]) == 0


def test_a_killed_attempt_that_finished_nothing_binds_nothing(tmp_path: Path) -> None:
    """A kill leaves the plan behind; with a source finished it does bind."""
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_bytes(TEXT[number * 100 :])
    (tmp_path / "30.jsonl").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        prepare([f"{tmp_path}/*.*"], tmp_path / "out")
    partial = partial_folder(tmp_path / "out")
    progress = (partial / "progress.jsonl").read_text()
    with pytest.raises(DataError, match="unfinished preparation with other options; type those again.*--overwrite"):
        prepare([f"{tmp_path}/*.txt"], tmp_path / "out", Options(val_fraction=0.3))
    assert (partial / "progress.jsonl").read_text() == progress
    (partial / "progress.jsonl").write_text("")
    prepare([f"{tmp_path}/*.txt"], tmp_path / "out", Options(val_fraction=0.3))
