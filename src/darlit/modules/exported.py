"""Exported models: weights, configuration and tokenizer in one safetensors file, which holds no code.

The tensors are the Transformer's, by its own names. The file's metadata has one entry, ``darlit``, a JSON object:
format, pathway, hyper_parameters, step, cell, identity, tokenizer (its description) and tokenizer_definition
(tokenizer.json).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from darlit.atomic import partial_file
from darlit.errors import DarlitError

EXPORT_SUFFIX = ".safetensors"
FORMAT = "darlit-model-1"
KEY = "darlit"


class Export(NamedTuple):
    """What an exported file holds."""

    saved: dict[str, Any]
    weights: dict[str, Tensor]


def write_export(path: Path, export: Export) -> None:
    """Write one file, whole or not at all, making its folder as needed."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weights = {name: tensor.contiguous() for name, tensor in export.weights.items()}
    with partial_file(path) as partial:
        try:
            save_file(weights, partial, metadata={KEY: json.dumps({"format": FORMAT, **export.saved})})
        except SafetensorError as error:  # its words for an error of the disk
            raise DarlitError(f"{path} cannot be written: {' '.join(str(error).split())}") from error


def read_export(path: Path) -> Export:
    """Read an exported file.

    Raises:
        DarlitError: a damaged file, or a safetensors file of another program.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            saved = json.loads((file.metadata() or {}).get(KEY, "null"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except (SafetensorError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DarlitError(f"{path} is refused: not a whole safetensors file ({reason})") from error
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise DarlitError(f"{path} is not a model that darlit export wrote; type: darlit export RUN --out {path.name}")
    return Export(saved, weights)
