from __future__ import annotations

import json
from pathlib import Path

import torch

from darlit.data.datamodule import TokenDataModule
from darlit.data.documents import document_ids
from darlit.data.prepare import Options, prepare


def test_document_ids_by_hand() -> None:
    tokens = torch.tensor([[5, 9, 9, 5, 5, 9], [9, 1, 2, 3, 4, 5]])
    assert document_ids(tokens, separator=9).tolist() == [[0, 0, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1]]


def test_documents_of_a_batch(tmp_path: Path) -> None:
    """The named documents hold exactly the text of the batch."""
    texts = [f"document number {number}. " * (1 + number % 5) for number in range(80)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", Options(val_fraction=0.3, chunk_tokens=500))
    data = TokenDataModule(folder=str(tmp_path / "out"), sequence_length=49, batch_size=3)
    data.prepare_data()
    data.setup()
    loader = data.train_dataloader()
    for tokens_BS in loader:
        named = data.documents_of_batch()
        for tokens, places in zip(tokens_BS, named, strict=True):
            assert len(places) == int(document_ids(tokens[None], data.separator)[0, -1]) + 1
            assert all(place.source.endswith("a.jsonl") for place in places)
            pieces = data.load_tokenizer()
            shown = b"|".join(
                pieces.decode(piece.tolist())
                for piece in tokens.tensor_split((tokens == data.separator).nonzero().flatten() + 1)
                if len(piece)
            )
            # Blank lines count: document n of the file is on line 2n.
            expected = [texts[place.number // 2].encode() for place in places]
            parts = shown.split(b"|")
            assert expected[0].endswith(parts[0]) or parts[0] in expected[0]
            assert parts[1:-1] == expected[1:-1]
            assert expected[-1].startswith(parts[-1]) or len(parts) == 1
    assert str(named[0][0]).startswith(f"{named[0][0].document} (")
