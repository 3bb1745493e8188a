"""A small corpus on disk and folders prepared from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from darlit.data.manifest import Manifest
from darlit.data.prepare import Options, prepare
from data.random_texts import random_text


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 60 text files of different lengths."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(60):
        text = random_text(number, words=5 + 13 * (number % 10))
        (folder / f"{number:02}.txt").write_bytes(text.encode("utf-8"))
    return folder


@pytest.fixture(scope="session")
def prepared(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Those files as bytes, in chunks of 1000 tokens."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    return prepare([str(texts)], out, Options(chunk_tokens=1000, val_fraction=0.2))
