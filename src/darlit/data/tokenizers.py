"""Tokenizers: plain bytes, byte-level BPE trained on the corpus, or any ``tokenizer.json``.

All of them map a document (``bytes``) to token ids and keep one id, the separator, that no text can produce:
it ends every document in the prepared stream. A prepared folder keeps a subword tokenizer as ``tokenizer.json``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darlit.data.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
PIECE_BYTES = 2**20  # longer documents are encoded piece by piece, so that memory stays flat

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPACES = frozenset(b" \t\n\r\x0b\x0c")
_LETTERS = frozenset(string.ascii_letters.encode())


class InvalidTextError(ValueError):
    """A document that is not UTF-8, for a tokenizer that needs it.

    ``document`` is its place in the batch, ``offset`` its first bad byte.
    """

    def __init__(self, document: int, offset: int) -> None:
        super().__init__(document, offset)
        self.document = document
        self.offset = offset


@dataclass(frozen=True)
class Loss:
    """What ids do not keep of one document: ``unknown`` of its tokens are the unknown token, and it decodes to other
    text from character ``place`` of ``text`` on, which becomes ``decoded``."""

    document: int
    unknown: int
    text: str
    decoded: str
    place: int

    def __str__(self) -> str:
        low = max(0, self.place - 10)
        was, became = (repr(text[low : self.place + 20]) for text in (self.text, self.decoded))
        return f"{was} becomes {became}" if was != became else f"{was} has {self.unknown} unknown tokens"


@dataclass(frozen=True)
class Encoded:
    """Ids of documents in a row, without separators, the number of each document's, and what they do not keep."""

    ids_N: NDArray[np.integer]
    lengths_D: NDArray[np.int64]
    losses: list[Loss] = field(default_factory=list)


class Tokenizer(ABC):
    """What preparation and training need of a tokenizer.

    ``vocab_size`` counts the separator; every id is below it. ``sha256`` changes whenever an id may change.
    ``definition`` is the content of a ``tokenizer.json``, ``None`` where nothing needs to be kept.
    """

    name: str
    definition: str | None
    separator_token: str | None
    vocab_size: int
    separator: int
    sha256: str

    @abstractmethod
    def encode_batch(self, documents: Sequence[bytes]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """All documents' ids in a row, without separators, and each one's length. Raises InvalidTextError."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> bytes:
        """The text of these ids; separators are left out."""

    @abstractmethod
    def token_bytes(self) -> NDArray[np.int64]:
        """Text bytes that each id stands for, ``[vocab_size]``.

        The separator, ids without a token and special tokens, which no text encodes to, have 0. The bytes of a text
        are the sum over its ids: exactly for bytes and byte-level BPE. Tokenizers that put a space before the first
        word of a text (SentencePiece, WordPiece) count that space too, one byte a document.
        """

    def encode_checked(self, documents: Sequence[bytes]) -> Encoded:
        """Encode and decode documents and compare. Raises InvalidTextError."""
        return Encoded(*self.encode_batch(documents))


class ByteTokenizer(Tokenizer):
    """One token a byte: ids 0–255 are the bytes, 256 is the separator. Keeps any input, UTF-8 or not."""

    name = "bytes"
    definition: str | None = None
    separator_token: str | None = None
    vocab_size = 257
    separator = 256
    sha256 = hashlib.sha256(b"darlit bytes: ids are the bytes, separator 256").hexdigest()

    def encode_batch(self, documents: Sequence[bytes]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        ids_N = np.frombuffer(b"".join(documents), dtype=np.uint8)
        return ids_N, np.array([len(document) for document in documents], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> bytes:
        return bytes(token for token in ids if token != self.separator)

    def token_bytes(self) -> NDArray[np.int64]:
        return np.array([1] * 256 + [0], dtype=np.int64)


class SubwordTokenizer(Tokenizer):
    """A ``tokenizers`` tokenizer. Special tokens written out in a text are text, never control ids.

    Args:
        definition: content of a ``tokenizer.json``.
        name: what reports call it.
        separator_token: token of the vocabulary that ends a document; ``None`` adds one id after the last.
    """

    def __init__(self, definition: str, name: str, separator_token: str | None = None) -> None:
        from tokenizers import Tokenizer as LibraryTokenizer

        try:
            self._tokenizer = LibraryTokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            reason = " ".join(str(error).split())
            raise DataError(f"{name}: not a tokenizer.json that `tokenizers` can read: {reason}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.name = name
        self.definition: str | None = definition
        self.separator_token = separator_token
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{name}: the tokenizer has an empty vocabulary")
        if separator_token is None:
            self.separator = max(ids.values()) + 1
        elif separator_token in ids:
            self.separator = ids[separator_token]
        else:
            raise DataError(f"{name}: separator token {separator_token!r} is not in its vocabulary")
        if separator_token and self.separator in self._tokenizer.encode(separator_token).ids:
            raise DataError(
                f"{name}: separator token {separator_token!r} is not a special token: a text can spell it; "
                "leave the separator out and one id is added for it"
            )
        self.vocab_size = max(*ids.values(), self.separator) + 1
        self._unknown, self._keeps_all = _unknown_id(self._tokenizer), _is_plain_byte_level(self._tokenizer)
        identity = json.dumps([definition, separator_token])
        self.sha256 = hashlib.sha256(identity.encode()).hexdigest()

    def encode_batch(self, documents: Sequence[bytes]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        _, owners, ids = self._encode_pieces(documents)
        return _in_a_row(len(documents), owners, ids)

    def encode_checked(self, documents: Sequence[bytes]) -> Encoded:
        texts, owners, ids = self._encode_pieces(documents)
        losses = []
        if not self._keeps_all:
            decoded = self._tokenizer.decode_batch(ids, skip_special_tokens=False)
            for text, kept, owner, piece in zip(texts, decoded, owners, ids, strict=True):
                unknown = 0 if self._unknown is None else piece.count(self._unknown)
                if unknown or text != kept:
                    losses.append(Loss(owner, unknown, text, kept, _first_difference(text, kept)))
        return Encoded(*_in_a_row(len(documents), owners, ids), losses)

    def _encode_pieces(self, documents: Sequence[bytes]) -> tuple[list[str], list[int], list[list[int]]]:
        """Text, document and ids of every piece."""
        texts, owners = [], []
        for number, document in enumerate(documents):
            for start, piece in split_pieces(document):
                texts.append(_decode_utf8(piece, number, start))
                owners.append(number)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return texts, owners, [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> bytes:
        text = self._tokenizer.decode([i for i in ids if i != self.separator], skip_special_tokens=False)
        return text.encode("utf-8")

    def token_bytes(self) -> NDArray[np.int64]:
        lengths_V = np.zeros(self.vocab_size, dtype=np.int64)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        decoders = _types(json.loads(self._tokenizer.to_str()).get("decoder"))
        if "ByteLevel" in decoders:  # a token is spelled with one character for each of its bytes
            lengths_V[list(vocabulary.values())] = [len(token) for token in vocabulary]
        else:
            lengths_V[list(vocabulary.values())] = self._lengths_after_another(list(vocabulary.values()))
            if "ByteFallback" in decoders:
                lengths_V[[i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)]] = 1
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            lengths_V[number] = 0 if token.special else len(token.content.encode("utf-8"))
        lengths_V[self.separator] = 0
        return lengths_V

    def _lengths_after_another(self, ids: list[int]) -> list[int]:
        """Bytes that each id adds to a decoded text: the first id of a text may lose its space."""

        def lengths(batch: list[list[int]]) -> list[int]:
            texts = self._tokenizer.decode_batch(batch, skip_special_tokens=False)
            return [len(text.encode("utf-8")) for text in texts]

        first = next((i for i, length in zip(ids, lengths([[i] for i in ids]), strict=True) if length), ids[0])
        alone = lengths([[first]])[0]
        return [length - alone for length in lengths([[first, i] for i in ids])]


def _types(decoder: Any) -> set[str]:
    """The types of a tokenizer.json's decoder and of the decoders it is a sequence of."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_types(inner) for inner in decoder.get("decoders", ())))


def _in_a_row(documents: int, owners: list[int], ids: list[list[int]]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    ids_N = np.array(list(itertools.chain.from_iterable(ids)), dtype=np.uint32)
    lengths_D = np.zeros(documents, dtype=np.int64)
    np.add.at(lengths_D, owners, [len(piece) for piece in ids])
    return ids_N, lengths_D


def _first_difference(text: str, other: str) -> int:
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(text), len(other)))


def _unknown_id(tokenizer: Any) -> int | None:
    """The id that stands for what the vocabulary lacks; a Unigram model has a number for it, others a token."""
    model = json.loads(tokenizer.to_str())["model"]
    token = model.get("unk_token")
    found: int | None = model.get("unk_id") if token is None else tokenizer.token_to_id(token)
    return found


def _is_plain_byte_level(tokenizer: Any) -> bool:
    """Whether it is byte-level BPE with all 256 bytes and without a normalizer: nothing needs to be decoded to know
    that it keeps every text."""
    from tokenizers import pre_tokenizers

    definition = json.loads(tokenizer.to_str())
    pre_tokenizer, decoder, model = definition["pre_tokenizer"] or {}, definition["decoder"] or {}, definition["model"]
    return bool(
        definition["normalizer"] is None
        and (pre_tokenizer.get("type"), pre_tokenizer.get("add_prefix_space")) == ("ByteLevel", False)
        and decoder.get("type") == "ByteLevel"
        and model["type"] == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and set(pre_tokenizers.ByteLevel.alphabet()) <= set(model["vocab"])
        and not definition["added_tokens"]
    )


def split_pieces(document: bytes, limit: int = PIECE_BYTES) -> list[tuple[int, bytes]]:
    """Cut a document into (offset, piece) of at most ``limit`` bytes where byte-level BPE does not merge.

    Concatenated, the pieces are the document. Most documents are one piece.
    """
    pieces = []
    start = 0
    while len(document) - start > limit:
        end = start + last_safe_cut(document[start : start + limit])
        pieces.append((start, document[start:end]))
        start = end
    pieces.append((start, document[start:]))
    return pieces


def last_safe_cut(window: bytes) -> int:
    """Where to cut the window when more text follows it: > 0, at best where no token can cross.

    Pre-tokenizers split before the first visible character of a line and before a single space between
    words; without either, the cut is at least between two UTF-8 characters.
    """
    lowest = len(window) // 2
    cut = len(window) - 1
    while (cut := window.rfind(b"\n", lowest, cut)) > 0:
        if window[cut + 1] < 0x80 and window[cut + 1] not in _SPACES:
            return cut + 1
    cut = len(window) - 1
    while (cut := window.rfind(b" ", max(lowest, 1), cut)) > 0:
        if window[cut - 1] in _LETTERS and window[cut + 1] in _LETTERS:
            return cut
    for cut in range(len(window) - 1, max(len(window) - 5, 0), -1):
        if window[cut] & 0xC0 != 0x80:  # a character starts here
            return cut
    return len(window)


def _decode_utf8(piece: bytes, document: int, start: int) -> str:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidTextError(document, start + error.start) from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """Train byte-level BPE; ``vocab_size`` counts the 256 bytes and the separator.

    A small corpus may give fewer tokens than asked for: read ``vocab_size`` from the result.
    """
    if vocab_size < 257:
        raise DataError(f"vocab_size {vocab_size} is too small for byte-level BPE; give 257 or more")
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordTokenizer(tokenizer.to_str(), name="bpe")


def load_tokenizer(spec: str, separator_token: str | None = None, name: str | None = None) -> Tokenizer:
    """``bytes``, the path of a ``tokenizer.json``, or the id of a tokenizer on the Hugging Face hub.

    Raises:
        DataError: none of these, with what to give instead.
    """
    if spec == "bytes":
        if separator_token is not None:
            raise DataError("tokenizer 'bytes' has its own separator; leave the separator out")
        return ByteTokenizer()
    path = Path(spec)
    if path.is_file():
        try:
            definition = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a readable tokenizer.json: {error}") from error
        return SubwordTokenizer(definition, name or path.stem, separator_token)
    if path.suffix == ".json" or spec.count("/") > 1 or spec.startswith((".", "/")):
        raise DataError(f"tokenizer file {spec} does not exist; give bytes, bpe, a tokenizer.json or a hub id")
    from tokenizers import Tokenizer as LibraryTokenizer

    try:
        definition = LibraryTokenizer.from_pretrained(spec).to_str()
    except Exception as error:  # the hub client raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"tokenizer {spec!r} is no file and could not be fetched from the hub ({reason}); "
            "give bytes, bpe, a tokenizer.json or a hub id"
        ) from error
    return SubwordTokenizer(definition, name or spec, separator_token)
