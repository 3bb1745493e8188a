"""The vocabulary of the data that a run will read, known before they are there."""

from __future__ import annotations

from pathlib import Path

from darlit.data.manifest import open_manifest
from darlit.data.prepare import default_options
from darlit.data.tokenizers import ByteTokenizer


def vocab_size_of(folder: str | Path | None, tokenizer: str | None = None) -> int:
    """Number of token ids: those of a prepared folder, or of the default corpus under its ``tokenizer``.

    Raises:
        DataError: a folder that is not there or is not a prepared one.
    """
    if folder is not None:
        return open_manifest(folder).vocab_size
    return default_options("bpe").vocab_size if tokenizer == "bpe" else ByteTokenizer.vocab_size
