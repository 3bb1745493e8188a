"""A really trained micro run for the tests of verbs that read one: made once, copied for each test that changes it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from cells import fit, run_folder, write_cell


def train(folder: Path, data_folder: Path, arm: str, **changes: Any) -> Path:
    """Fit five steps of a micro cell; returns the run folder."""
    cell = write_cell(folder, data_folder, arm, budget__tokens=5 * 256, **changes)
    assert fit(cell) == 0
    return run_folder(cell)


class Payload:
    """Unpickled, it writes a file: the sign that a checkpoint ran code."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> Any:
        return (Path.touch, (self.sign,))


def poison(run: Path, sign: Path) -> None:
    """Hide the payload in the run's last checkpoint."""
    path = run / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    torch.save({**checkpoint, "extra": Payload(sign)}, path, pickle_module=pickle)
