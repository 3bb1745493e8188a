"""A checkpoint under its name is always a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from darlit.checkpoint_io import AtomicCheckpointIO, find, put_in_place


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


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "shard").write_text(content)
    return path


def content(path: Path) -> str:
    return (path / "shard").read_text() if path.is_dir() else path.read_text()


@pytest.mark.parametrize("earlier", ["none", "file", "folder"])
def test_whenever_a_folder_is_put_in_place_a_whole_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: str
) -> None:
    """Broken off before each of its renames in turn, and then repeated."""
    original = Path.rename
    for broken_at in range(3):
        path = tmp_path / str(broken_at) / "last.ckpt"
        path.parent.mkdir()
        if earlier == "folder":
            folder(path, "one")
        elif earlier == "file":
            path.write_text("one")
        renames = iter(range(10))

        def rename(self: Path, target: Path, renames: object = renames, broken_at: int = broken_at) -> Path:
            if next(renames) == broken_at:  # type: ignore[call-overload]
                raise KeyboardInterrupt
            return original(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            try:
                put_in_place(folder(path.with_name(".last.ckpt.part"), "two"), path)
                done = True
            except KeyboardInterrupt:
                done = False
        found = find(path)
        assert (found is None) == (earlier == "none" and not done)
        assert found is None or content(found) == ("two" if done else "one")
        if not done:
            put_in_place(path.with_name(".last.ckpt.part"), path)
        assert find(path) == path
        assert content(path) == "two"
        assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


def test_a_file_replaces_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "last.ckpt", "one")
    AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
