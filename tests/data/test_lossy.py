"""Tokenizers that do not keep every text are found, and where they are accepted the folder says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from darlit.__main__ import main
from darlit.data.errors import DataError
from darlit.data.prepare import Options, prepare
from darlit.data.tokenizers import SubwordTokenizer, train_bpe

TEXTS = [f"the cat sat on mat {number}" for number in range(40)]


def few_words(path: Path) -> str:
    words = {word: number for number, word in enumerate(["the", "cat", "sat", "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(path))
    return str(path)


def lower_case(path: Path) -> str:
    tokenizer = Tokenizer.from_str(str(train_bpe(TEXTS, 300).definition))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(path))
    return str(path)


def few_characters(path: Path) -> str:
    tokenizer = Tokenizer(models.BPE({"a": 0, "t": 1, "at": 2, " ": 3}, [("a", "t")]))
    tokenizer.save(str(path))
    return str(path)


def unigram(path: Path) -> str:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("the", -1.0), (" ", -1.0), ("cat", -1.0)], unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:02}.txt").write_text(text if number != 20 else text.upper())
    return f"{tmp_path}/*.txt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            few_words,
            r"00\.txt: document 0: tokenizer words does not keep its text: 'e cat sat on mat 0' becomes 'e cat .*UNK",
        ),
        (lower_case, r"20\.txt: document 0: .*'THE CAT SAT ON MAT 2' becomes 'the cat sat on mat 2'"),
        (few_characters, r"00\.txt: .* becomes "),
        (unigram, r"00\.txt: .* becomes "),
    ],
    ids=["few words", "lower case", "few characters", "unigram"],
)
def test_what_a_tokenizer_loses_is_found(tmp_path: Path, corpus: str, make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        prepare([corpus], tmp_path / "out", Options(tokenizer=make(tmp_path / "words.json")))
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_unknown_tokens_that_are_spelled_like_the_text(tmp_path: Path) -> None:
    """Decoding gives the text back, and yet nothing of it was kept."""
    tokenizer = SubwordTokenizer(Path(few_words(tmp_path / "words.json")).read_text(), "words")
    [loss] = tokenizer.encode_checked([b"the [UNK]"]).losses
    assert (loss.unknown, loss.text, loss.decoded) == (1, "the [UNK]", "the [UNK]")
    assert str(loss) == "'the [UNK]' has 1 unknown tokens"


def test_accepted_it_is_marked(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and the option; with the option the command, the manifest and the data's description say it."""
    arguments = ["prepare", corpus, "--out", str(tmp_path / "out"), "--tokenizer", few_words(tmp_path / "words.json")]
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("--lossy-tokenizer")
    assert main([*arguments, "--val-fraction", "0.3", "--lossy-tokenizer"]) == 0
    said = "lossy: 40 documents are not kept, 123 tokens are unknown"
    assert said in capsys.readouterr().out
    assert main(["data", "info", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "40 documents are not kept, 123 tokens are unknown" in shown
    assert "tokenizer    words (lossy)" in shown


def test_tokenizers_that_keep_everything(tmp_path: Path, corpus: str) -> None:
    """Bytes, trained BPE, and any other that decodes to the text."""
    for tokenizer in ("bytes", "bpe"):
        manifest = prepare(
            [corpus], tmp_path / tokenizer, Options(tokenizer=tokenizer, vocab_size=300, val_fraction=0.3)
        )
        assert manifest.content["lossy"] == {"lossy_documents": 0, "unknown_tokens": 0}
        assert manifest.lossy == ""
        assert manifest.tokenizer_name == tokenizer
    tokenizer = Tokenizer.from_str(str(train_bpe(TEXTS, 300).definition))
    tokenizer.add_special_tokens(["<pad>"])
    found = SubwordTokenizer(tokenizer.to_str(), "padded").encode_checked([text.encode() for text in TEXTS])
    assert found.losses == []
