from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from darlit.data.errors import DataError
from darlit.data.tokenizers import (
    PIECE_BYTES,
    ByteTokenizer,
    InvalidTextError,
    SubwordTokenizer,
    load_tokenizer,
    split_pieces,
    train_bpe,
)
from data.random_texts import random_text

SCRIPTS = [
    "",
    "plain",
    "né à l'été",
    "Ελληνικά",
    "русский",
    "עברית",
    "हिन्दी",
    "中文字符",
    "🙂👩‍👩‍👧",
    "a\r\nb\r\n",
    "\0x\0",
]


@pytest.fixture(scope="module")
def bpe() -> SubwordTokenizer:
    return train_bpe([random_text(seed, 400) for seed in range(20)], 500)


@given(st.binary())
def test_bytes_keep_any_input(document: bytes) -> None:
    tokenizer = ByteTokenizer()
    ids, lengths = tokenizer.encode_batch([document])
    assert tokenizer.decode(ids.tolist()) == document
    assert lengths.tolist() == [len(document)]
    assert tokenizer.separator not in ids


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_bpe_keeps_any_text(bpe: SubwordTokenizer, text: str) -> None:
    document = text.encode("utf-8", "ignore")
    ids, _ = bpe.encode_batch([document])
    assert bpe.decode(ids.tolist()) == document


def test_scripts_in_one_batch(bpe: SubwordTokenizer) -> None:
    documents = [text.encode() for text in SCRIPTS]
    ids, lengths = bpe.encode_batch(documents)
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    assert [bpe.decode(part.tolist()) for part in parts] == documents
    assert ids.max() < bpe.separator == bpe.vocab_size - 1


def test_bpe_training_repeats_and_merges(bpe: SubwordTokenizer) -> None:
    again = train_bpe([random_text(seed, 400) for seed in range(20)], 500)
    assert again.sha256 == bpe.sha256
    assert len(bpe.encode_batch([b"stream branch query"])[0]) < 10


def test_invalid_utf8_names_document_and_offset(bpe: SubwordTokenizer) -> None:
    with pytest.raises(InvalidTextError) as caught:
        bpe.encode_batch([b"fine", b"abc\xffdef"])
    assert (caught.value.document, caught.value.offset) == (1, 3)


def test_invalid_utf8_offset_counts_from_the_documents_start(bpe: SubwordTokenizer) -> None:
    document = b"word " * (PIECE_BYTES // 5 + 1000) + b"\xff"
    with pytest.raises(InvalidTextError) as caught:
        bpe.encode_batch([document])
    assert caught.value.offset == len(document) - 1


@given(st.lists(st.sampled_from(["a", " ", "\n", "é", "世", "🙂", "b c", "\r\n", "1 "]), max_size=80).map("".join))
def test_pieces_join_to_the_document_and_stay_utf8(text: str) -> None:
    document = text.encode()
    pieces = split_pieces(document, limit=12)
    assert b"".join(piece for _, piece in pieces) == document
    for start, piece in pieces:
        assert len(piece) <= 12
        assert document[start : start + len(piece)] == piece
        piece.decode("utf-8")


def test_pieces_of_invalid_utf8_end() -> None:
    assert b"".join(piece for _, piece in split_pieces(b"\x80" * 100, limit=10)) == b"\x80" * 100


def test_cut_documents_have_the_same_tokens(bpe: SubwordTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end where no merge crosses, so cutting a text of words and lines changes no id."""
    document = " ".join(["alpha beta gamma"] * 50 + ["\nline two"] * 50).encode()
    whole, _ = bpe.encode_batch([document])
    monkeypatch.setattr("darlit.data.tokenizers.split_pieces", lambda text: split_pieces(text, limit=64))
    cut, _ = bpe.encode_batch([document])
    assert cut.tolist() == whole.tolist()


def test_special_tokens_written_in_a_text_stay_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(train_bpe(["a b c"], 300).definition or "")
    library.add_special_tokens(["<|end|>"])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    tokenizer = load_tokenizer(str(path), "<|end|>")
    ids, _ = tokenizer.encode_batch([b"stop <|end|> here"])
    assert tokenizer.separator == library.token_to_id("<|end|>")
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids.tolist()) == b"stop <|end|> here"


def test_separator_that_a_text_can_spell_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(["a b c"], 300).definition or "", encoding="utf-8")
    with pytest.raises(DataError, match="a text can spell it"):
        load_tokenizer(str(path), "a")


@pytest.mark.parametrize(
    ("spec", "separator", "message"),
    [
        ("missing/tokenizer.json", None, "does not exist"),
        ("bytes", "<s>", "own separator"),
        ("{broken}", None, "not a tokenizer.json"),
        ("{good}", "<no>", "not in its vocabulary"),
    ],
)
def test_bad_tokenizers(tmp_path: Path, spec: str, separator: str | None, message: str) -> None:
    broken, good = tmp_path / "broken.json", tmp_path / "good.json"
    broken.write_text(json.dumps({"kind": "nothing"}))
    good.write_text(train_bpe(["a"], 257).definition or "", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_tokenizer(spec.format(broken=broken, good=good) if "{" in spec else spec, separator)


def test_vocabulary_too_small() -> None:
    with pytest.raises(DataError, match="257 or more"):
        train_bpe(["a"], 200)


def spelled(tokenizer: SubwordTokenizer | ByteTokenizer, document: bytes) -> int:
    """Bytes of a document's ids by the table."""
    ids, _ = tokenizer.encode_batch([document])
    return int(tokenizer.token_bytes()[ids].sum())


@pytest.mark.parametrize("text", SCRIPTS)
def test_ids_have_exactly_the_bytes_of_their_text(bpe: SubwordTokenizer, text: str) -> None:
    """Also where a character of several bytes is several tokens, each of which alone is no text."""
    document = text.encode()
    assert spelled(bpe, document) == len(document)
    assert spelled(ByteTokenizer(), document) == len(document)


def test_the_separator_and_special_tokens_have_no_bytes() -> None:
    assert ByteTokenizer().token_bytes().tolist() == [1] * 256 + [0]
    trained = train_bpe(["some words and more words"] * 5, 300)
    assert trained.token_bytes()[trained.separator] == 0
    content = json.loads(trained.definition or "")
    number = max(content["model"]["vocab"].values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": number, "content": "<end>", "special": True, **flags},
        {"id": number + 1, "content": "wörd", "special": False, **flags},
    ]
    added = SubwordTokenizer(json.dumps(content), "added", "<end>")
    assert added.separator == number
    assert added.token_bytes()[[number, number + 1]].tolist() == [0, 5]
    assert spelled(added, "a wörd <end>".encode()) == len("a wörd <end>".encode())


def test_other_tokenizers_are_exact_but_for_the_space_before_a_document() -> None:
    """SentencePiece's way: ▁ for spaces, one put first, and bytes for what is not in the vocabulary."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlorw", "▁hello", "▁world"]
    library = LibraryTokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = SubwordTokenizer(library.to_str(), "pieces")
    document = "hello wörld 🙂 a".encode()
    ids, _ = tokenizer.encode_batch([document])
    assert tokenizer.decode(ids.tolist()) == document
    assert spelled(tokenizer, document) == len(document) + 1
    table = tokenizer.token_bytes()
    assert table[pieces.index("▁hello")] == 6
    assert table[pieces.index("<0xF0>")] == 1
