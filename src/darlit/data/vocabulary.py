"""The vocabulary of the data that a run will read, known before they are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def take_vocabulary(config: Any) -> None:
    """Set ``backbone.vocab_size`` of a resolved configuration to that of its data where the experiment leaves it open.

    Raises:
        DataError: data that are not there.
    """
    backbone, data = config["model"]["init_args"]["backbone"], config["data"]
    if backbone["vocab_size"] is None:
        backbone["vocab_size"] = vocab_size_of(data["folder"], data["tokenizer"])
