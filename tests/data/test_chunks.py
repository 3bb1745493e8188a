"""The chunks are litdata's: its own writer makes the same files, its own reader reads ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from darlit.data.chunks import DOCUMENT_DTYPE, SplitWriter, chunk_name, token_dtype

pytestmark = pytest.mark.usefixtures("_offline_litdata")


@pytest.fixture
def _offline_litdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITDATA_DISABLE_VERSION_CHECK", "1")


def write(folder: Path, tokens: np.ndarray, dtype: type, chunk_tokens: int, parts: int) -> None:
    writer = SplitWriter(folder, np.dtype(dtype), chunk_tokens)
    for part in np.array_split(tokens, parts):
        writer.write(part, [0], 0, [0])
    writer.finish()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("size", [1, 99, 100, 101, 250, 300])
def test_same_files_as_litdatas_writer(tmp_path: Path, dtype: type, size: int) -> None:
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    tokens = np.random.default_rng(0).integers(0, 60000, size).astype(dtype)
    write(tmp_path / "ours", tokens, dtype, chunk_tokens=100, parts=7)
    theirs = BinaryWriter(str(tmp_path / "theirs"), chunk_size=100, item_loader=TokensLoader())
    for number, first in enumerate(range(0, size, 100)):
        theirs.add_item(number, tokens[first : first + 100])
    theirs.done()
    theirs.merge()

    ours_index, theirs_index = (
        json.loads((tmp_path / side / "index.json").read_bytes()) for side in ("ours", "theirs")
    )
    assert ours_index["chunks"] == theirs_index["chunks"]
    for key in ("data_format", "data_spec", "chunk_size", "chunk_bytes", "compression", "encryption", "item_loader"):
        assert ours_index["config"][key] == theirs_index["config"][key], key
    for chunk in theirs_index["chunks"]:
        name = chunk["filename"]
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize("block_size", [1, 7, 50])
def test_read_by_litdata(tmp_path: Path, block_size: int) -> None:
    from litdata import StreamingDataset, TokensLoader

    tokens = np.arange(1234, dtype=np.uint16)
    write(tmp_path, tokens, np.uint16, chunk_tokens=500, parts=3)
    stream = StreamingDataset(str(tmp_path), item_loader=TokensLoader(block_size=block_size))
    expected = [
        chunk[first : first + block_size].tolist()
        for chunk in (tokens[:500], tokens[500:1000], tokens[1000:])
        for first in range(0, len(chunk) - block_size + 1, block_size)
    ]
    assert [stream[i].tolist() for i in range(len(expected))] == expected
    assert len(stream) == len(expected)


@pytest.mark.parametrize("cut", [0, 1, 99, 100, 101, 200, 260])
def test_goes_on_from_a_place(tmp_path: Path, cut: int) -> None:
    """Whatever was written after the noted place is dropped, and the result is the same."""
    tokens = np.random.default_rng(1).integers(0, 257, 260)
    write(tmp_path / "straight", tokens, np.uint16, chunk_tokens=100, parts=1)

    first = SplitWriter(tmp_path / "resumed", np.dtype(np.uint16), 100)
    first.write(tokens[:cut], [0], 0, [0])
    first.flush()
    place = first.tokens, first.documents
    first.write(np.full(150, 7), [0, 5, 9], 3, [1, 2, 3])
    first.flush()
    first.close()
    second = SplitWriter(tmp_path / "resumed", np.dtype(np.uint16), 100, *place)
    second.write(tokens[cut:], [], 0, [])
    second.finish()

    for path in sorted((tmp_path / "straight").iterdir()):
        assert path.read_bytes() == (tmp_path / "resumed" / path.name).read_bytes(), path.name
    assert {p.name for p in (tmp_path / "resumed").iterdir()} == {p.name for p in (tmp_path / "straight").iterdir()}


def test_document_table(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, np.dtype(np.uint16), 100)
    writer.write(np.zeros(60), [0, 20], 4, [7, 9])
    writer.write(np.zeros(60), [10], 5, [0])
    chunks = writer.finish()
    table = np.fromfile(tmp_path / "documents.bin", dtype=DOCUMENT_DTYPE)
    assert table.tolist() == [(0, 4, 7), (20, 4, 9), (70, 5, 0)]
    assert chunks == [
        {"file": chunk_name(0), "first_token": 0, "tokens": 100},
        {"file": chunk_name(1), "first_token": 100, "tokens": 20},
    ]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_dtype_by_vocabulary(vocab_size: int, dtype: str) -> None:
    assert str(token_dtype(vocab_size)) == dtype
