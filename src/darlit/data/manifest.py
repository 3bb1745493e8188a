"""The manifest of a prepared folder: what is in it, where it came from, and whether it is still so.

``manifest.json`` lists every file with its size and sha256, every chunk with its token range, the tokenizer,
the split rule and the sources. ``manifest.sha256`` beside it holds its own hash in the format of the
``sha256sum`` command. The fingerprint covers exactly what training can see: tokens, tokenizer and split.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from darlit.data import LOSSY
from darlit.data.chunks import DOCUMENT_DTYPE, DOCUMENTS_FILE, HEADER, INDEX_FILE
from darlit.data.errors import DataError
from darlit.data.tokenizers import TOKENIZER_FILE, ByteTokenizer, SubwordTokenizer, Tokenizer

MANIFEST_FILE = "manifest.json"
MANIFEST_HASH_FILE = "manifest.sha256"
FORMAT = "darlit-tokens-1"
_READ_BYTES = 4 * 2**20


def partial_folder(folder: Path) -> Path:
    """Where a preparation of ``folder`` works until it is complete."""
    return folder.with_name(folder.name + ".partial")


@dataclass(frozen=True)
class Manifest:
    """A prepared folder's manifest; ``content`` is the whole of ``manifest.json``."""

    folder: Path
    content: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return str(self.content["fingerprint"])

    @property
    def vocab_size(self) -> int:
        return int(self.content["tokenizer"]["vocab_size"])

    @property
    def separator(self) -> int:
        return int(self.content["tokenizer"]["separator"])

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, with a mark where it did not keep all of the texts."""
        return str(self.content["tokenizer"]["name"]) + (LOSSY if self.lossy else "")

    @property
    def lossy(self) -> str:
        """What the tokenizer did not keep of the texts, in words; empty: it kept everything."""
        lossy = self.content.get("lossy") or {}
        if not any(lossy.values()):
            return ""
        return f"{lossy['lossy_documents']:,} documents are not kept, {lossy['unknown_tokens']:,} tokens are unknown"

    def split(self, name: str) -> dict[str, Any]:
        """``{tokens, bytes, documents, chunks}`` of the split ``train`` or ``val``."""
        return dict(self.content["splits"][name])

    def bytes_per_token(self, split: str) -> float:
        """Text bytes over tokens (separators counted), the factor between loss and bits per byte."""
        return float(self.content["splits"][split]["bytes"] / self.content["splits"][split]["tokens"])

    def token_bytes(self) -> np.ndarray:
        """Text bytes of every token id, int64 ``[vocab_size]``; see `Tokenizer.token_bytes`."""
        return self.tokenizer().token_bytes()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the folder."""
        described = self.content["tokenizer"]
        if described["kind"] == "bytes":
            return ByteTokenizer()
        definition = (self.folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        return SubwordTokenizer(definition, described["name"], described["separator_token"])

    def check_length(self, sequence_length: int, *splits: str) -> None:
        """Raise DataError for a sequence length that is longer than every chunk of a split; by default of both."""
        for split in splits or self.content["splits"]:
            longest = max(chunk["tokens"] for chunk in self.split(split)["chunks"]) - 1
            if not 1 <= sequence_length <= longest:
                raise DataError(
                    f"sequence_length {sequence_length}: the longest that {self.folder / split} can give is "
                    f"{longest} and the shortest 1; lower sequence_length or prepare more data"
                )

    def check_sizes(self) -> None:
        """Compare the size of every file, and the hash of indexes and tokenizer, with the manifest, in milliseconds.

        Raises:
            DataError: the first file that differs.
        """
        for name, described in self.content["files"].items():
            path = self.folder / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DataError(
                    f"{path}: missing or unreadable ({error.strerror}); copy the folder again or prepare it again"
                ) from error
            if size != described["bytes"]:
                raise DataError(
                    f"{path}: damaged: {size} bytes where the manifest says {described['bytes']}; "
                    "copy the folder again or prepare it again"
                )
            if path.name in (INDEX_FILE, TOKENIZER_FILE):
                self._check_hash(name)

    def check_hashes(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Read every file and compare its sha256 with the manifest. Raises DataError.

        ``on_bytes`` hears the number of bytes after every read, for a progress bar.
        """
        self.check_sizes()
        for name in self.content["files"]:
            self._check_hash(name, on_bytes)

    def _check_hash(self, name: str, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        path = self.folder / name
        if file_sha256(path, on_bytes) != self.content["files"][name]["sha256"]:
            raise DataError(
                f"{path}: damaged: its sha256 differs from the manifest; copy the folder again or prepare it again"
            )


def open_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a prepared folder and check it against its own hash.

    Raises:
        DataError: no such folder, not a prepared folder, an unfinished one, or a damaged manifest.
    """
    folder = Path(folder)
    path = folder / MANIFEST_FILE
    try:
        raw = path.read_bytes()
        expected = (folder / MANIFEST_HASH_FILE).read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(_why_not_prepared(folder)) from error
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if expected != _hash_line(raw):
        raise DataError(
            f"{path}: damaged: its sha256 differs from {MANIFEST_HASH_FILE}; copy the folder again or prepare it again"
        )
    _check_content(path, raw)
    return Manifest(folder, json.loads(raw))


def _check_content(path: Path, raw: bytes) -> None:
    """Raise DataError unless a manifest has everything that is read from it, and agrees with itself."""
    try:
        content = json.loads(raw)
        found = content.get("format")
        if found != FORMAT:
            raise DataError(f"{path}: format {found!r} where this darlit reads {FORMAT!r}; prepare the data again")
        named = {INDEX_FILE, DOCUMENTS_FILE}
        for split in content["splits"].values():
            named |= {chunk["file"] for chunk in split["chunks"]}
            if not split["chunks"] or sum(chunk["tokens"] for chunk in split["chunks"]) != split["tokens"]:
                raise ValueError("the tokens of its chunks are not those of the split")
            int(split["documents"]), int(split["bytes"]), [int(chunk["first_token"]) for chunk in split["chunks"]]
        content["splits"]["train"], content["splits"]["val"], content["split_rule"], content["versions"].items()
        content["tokenizer"]["name"], content["tokenizer"]["kind"], content["tokenizer"]["separator_token"]
        [source["path"] for source in content["sources"]]
        listed = {
            Path(name).name for name, file in content["files"].items() if int(file["bytes"]) >= 0 and file["sha256"]
        }
        if not named <= listed:
            raise ValueError(f"files has no {min(named - listed)}")
        if fingerprint(content) != content["fingerprint"]:
            raise ValueError("its fingerprint is not that of its content")
    except DataError:
        raise
    except KeyError as error:
        raise DataError(f"{path}: malformed: no {error}; copy the folder again or prepare it again") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: malformed: {reason}; copy the folder again or prepare it again") from error


def _why_not_prepared(folder: Path) -> str:
    remedy = f"type: darlit prepare SOURCE --out {folder}"
    if not folder.exists():
        if partial_folder(folder).exists():
            return (
                f"data folder {folder} does not exist: its preparation was interrupted; "
                "type the same `darlit prepare` again to go on"
            )
        return f"data folder {folder} does not exist; {remedy}"
    if not folder.is_dir():
        return f"data folder {folder} is a file; {remedy}"
    if (folder / MANIFEST_FILE).exists():
        return f"{folder / MANIFEST_HASH_FILE}: missing; copy the folder again or prepare it again"
    if (folder / MANIFEST_HASH_FILE).exists():
        return f"{folder / MANIFEST_FILE}: missing; copy the folder again or prepare it again"
    if folder.name in ("train", "val") and (folder.parent / MANIFEST_FILE).exists():
        return f"{folder} is one split of a prepared folder; give {folder.parent}"
    if (folder / INDEX_FILE).exists():
        return (
            f"{folder} holds litdata chunks of another program ({_item_loader(folder)}): darlit needs chunks for "
            f"TokensLoader with a {MANIFEST_FILE}; prepare the texts themselves: darlit prepare SOURCE --out NEW"
        )
    return f"{folder} is not a prepared data folder (no {MANIFEST_FILE}); {remedy}"


def _item_loader(folder: Path) -> str:
    try:
        return f"written with {json.loads((folder / INDEX_FILE).read_bytes())['config']['item_loader']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "with an unreadable index"


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The manifest's entry for a tokenizer."""
    return {
        "kind": "bytes" if tokenizer.definition is None else "subword",
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "separator_token": tokenizer.separator_token,
    }


def write_manifest(folder: Path, content: dict[str, Any], on_bytes: Callable[[int], None] = lambda _: None) -> Manifest:
    """Verify the finished files of ``folder``, add their sizes and hashes to ``content``, and write it.

    Every chunk is read back: its ids must be below the vocabulary and its separators as many as the documents.

    Raises:
        DataError: the disk did not keep what was written.
    """
    content = {"format": FORMAT, **content, "files": {}}
    for name, split in content["splits"].items():
        separators = 0
        for chunk in split["chunks"]:
            path = folder / name / chunk["file"]
            chunk["sha256"] = file_sha256(path, on_bytes)
            tokens = np.memmap(path, dtype=content["dtype"], mode="r", offset=HEADER.size)
            if len(tokens) != chunk["tokens"] or tokens.max() >= content["tokenizer"]["vocab_size"]:
                raise DataError(f"{path}: reads back differently than it was written; check the disk")
            separators += int(np.count_nonzero(tokens == content["tokenizer"]["separator"]))
            content["files"][f"{name}/{chunk['file']}"] = _describe(path, chunk["sha256"])
        if separators != split["documents"]:
            raise DataError(
                f"{folder / name}: {separators} separators for {split['documents']} documents; check the disk"
            )
        for other in (INDEX_FILE, DOCUMENTS_FILE):
            path = folder / name / other
            content["files"][f"{name}/{other}"] = _describe(path, file_sha256(path))
    if (folder / TOKENIZER_FILE).exists():
        path = folder / TOKENIZER_FILE
        content["files"][TOKENIZER_FILE] = _describe(path, file_sha256(path))
    content["fingerprint"] = fingerprint(content)
    raw = json.dumps(content, indent=1).encode() + b"\n"
    _write_synced(folder / MANIFEST_FILE, raw)
    _write_synced(folder / MANIFEST_HASH_FILE, _hash_line(raw).encode())
    return Manifest(folder, content)


def fingerprint(content: dict[str, Any]) -> str:
    """sha256 over what training can see of a folder: tokens, their order, tokenizer, split."""
    visible = {
        "format": content["format"],
        "dtype": content["dtype"],
        "tokenizer": {key: content["tokenizer"][key] for key in ("sha256", "vocab_size", "separator")},
        "splits": content["splits"],
    }
    return hashlib.sha256(json.dumps(visible, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Hex sha256 of a file, read a few MiB at a time. Raises DataError where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                on_bytes(len(block))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def read_documents(folder: Path, split: str) -> np.ndarray:
    """The document table of a split (``chunks.DOCUMENT_DTYPE``), mapped from disk."""
    path = folder / split / DOCUMENTS_FILE
    if path.stat().st_size == 0:
        return np.empty(0, dtype=DOCUMENT_DTYPE)
    return np.memmap(path, dtype=DOCUMENT_DTYPE, mode="r")


def _describe(path: Path, sha256: str) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256}


def _hash_line(raw: bytes) -> str:
    return f"{hashlib.sha256(raw).hexdigest()}  {MANIFEST_FILE}\n"


def _write_synced(path: Path, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
