"""A checkpoint under its name is always a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from darlit.checkpoint_io import AtomicCheckpointIO


def test_a_save_that_breaks_off_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def break_off(checkpoint: object, file: object) -> None:
        file.write(b"half of a checkpoint")  # type: ignore[attr-defined]
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", break_off)
        with pytest.raises(OSError, match="the disk is full"):
            AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}

    AtomicCheckpointIO().save_checkpoint({"step": 3}, path)
    assert torch.load(path, weights_only=True) == {"step": 3}
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


def test_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not allowed"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt", storage_options={"region": "x"})
