"""One step of preparation: a batch of records becomes, for each split, one run of tokens.

Steps are independent of each other, so threads can take them: the heavy parts (tokenizers, hashing, numpy)
release Python's lock. The caller writes the results in order, so the thread count never shows in the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from darlit.data.errors import DataError
from darlit.data.sources import Batch, Source, document_digest, parse_json_lines
from darlit.data.tokenizers import InvalidTextError, Tokenizer

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Documents:
    """The documents of one batch. ``numbers`` count within the source, ``digests`` decide the split."""

    numbers: list[int]
    texts: list[bytes]
    digests: list[bytes]
    offsets: list[int]
    continues: bool
    open_end: bool


@dataclass(frozen=True)
class Run:
    """What one batch adds to one split: ``tokens_N`` with separators, and where documents start in it."""

    tokens_N: NDArray[np.integer]
    starts: list[int]
    numbers: list[int]
    text_bytes: int
    lossy_documents: int = 0
    unknown_tokens: int = 0


@dataclass(frozen=True)
class SplitRule:
    """A document belongs to validation when its digest, as a fraction of all digests, is in
    ``[val_start, val_start + val_fraction)``, to training when it is above, and to neither when it is below.

    A document's split depends on nothing but its bytes, so it stays when other files are added.
    """

    val_fraction: float
    val_start: float = 0.0

    @property
    def split_at(self) -> tuple[float, ...]:
        """Where one text alone is cut, as shares of it, so that the same rule sends its parts to the splits."""
        bounds = (self.val_start, self.val_start + self.val_fraction)
        return bounds if self.val_start else bounds[1:]

    def split_of(self, digest: bytes) -> str | None:
        place = int.from_bytes(digest[:8], "big")
        if place < self.val_start * 2**64:
            return None
        return "val" if place < (self.val_start + self.val_fraction) * 2**64 else "train"

    def describe(self, within_one_text: bool) -> str:
        """The rule in words, for the manifest."""
        if within_one_text:
            return f"val is the text from {self.val_start} to {self.val_start + self.val_fraction} of its length"
        bounds = f"is below {self.val_fraction}"
        if self.val_start:
            bounds = (
                f"is from {self.val_start} to below {self.val_start + self.val_fraction}; left out when it is lower"
            )
        return f"val when the document's BLAKE2b-128, as a fraction, {bounds}"


def read_documents_of(batch: Batch, source: Source, text_field: str) -> Documents:
    """Parse a batch's records and hash its documents. Raises DataError with path and line."""
    if source.kind == "jsonl":
        numbers, texts = parse_json_lines(batch, source, text_field)
    else:
        numbers, texts = list(range(batch.first, batch.first + len(batch.records))), batch.records
    digests = [batch.digest] * len(texts) if batch.digest else [document_digest(text) for text in texts]
    return Documents(numbers, texts, digests, batch.offsets, batch.continues, batch.open_end)


class DuplicateFilter:
    """Keeps the first of documents with equal bytes. Batches must come in order.

    ``new_digests`` are those added since the last ``take_digests``; a resumed preparation starts from the
    digests that were written down.
    """

    def __init__(self, seen: Iterable[bytes] = ()) -> None:
        self._seen = set(seen)
        self._new: list[bytes] = []
        self._dropping = False

    def __call__(self, documents: Documents) -> Documents:
        if documents.continues:  # the first part of a long document has decided for all
            return replace(documents, texts=[], digests=[], numbers=[], offsets=[]) if self._dropping else documents
        kept = [place for place, digest in enumerate(documents.digests) if self._is_new(digest)]
        self._dropping = documents.open_end and not kept
        return replace(
            documents,
            numbers=[documents.numbers[place] for place in kept],
            texts=[documents.texts[place] for place in kept],
            digests=[documents.digests[place] for place in kept],
            offsets=[documents.offsets[place] for place in kept] if documents.offsets else [],
        )

    def take_digests(self) -> bytes:
        taken, self._new = b"".join(self._new), []
        return taken

    def _is_new(self, digest: bytes) -> bool:
        if digest in self._seen:
            return False
        self._seen.add(digest)
        self._new.append(digest)
        return True


def encode(
    documents: Documents, source: Source, tokenizer: Tokenizer, rule: SplitRule, lossy: bool = False
) -> dict[str, Run]:
    """Tokenize documents, split by split, each followed by the separator (a part only by what follows it).

    Args:
        documents: of one batch.
        source: where they come from, for errors.
        tokenizer: what encodes them.
        rule: which split each belongs to.
        lossy: count the documents that the tokenizer does not keep instead of rejecting them.

    Raises:
        DataError: a document that is not UTF-8 or that the tokenizer does not keep.
    """
    runs = {}
    for split in SPLITS:
        places = [p for p, digest in enumerate(documents.digests) if rule.split_of(digest) == split]
        if places:
            runs[split] = _encode_run(documents, places, source, tokenizer, lossy)
    return runs


def _encode_run(documents: Documents, places: Sequence[int], source: Source, tokenizer: Tokenizer, lossy: bool) -> Run:
    texts = [documents.texts[place] for place in places]
    try:
        encoded = tokenizer.encode_checked(texts)
    except InvalidTextError as error:
        place = places[error.document]
        where = (
            f"byte {documents.offsets[place] + error.offset}"
            if documents.offsets
            else f"document {documents.numbers[place]}, byte {error.offset}"
        )
        raise DataError(
            f"{source.name}: {where}: not UTF-8, which tokenizer {tokenizer.name} needs; "
            "fix the file or use --tokenizer bytes"
        ) from error
    ids_N, lengths_D = encoded.ids_N, encoded.lengths_D
    if encoded.losses and not lossy:
        raise DataError(
            f"{source.name}: document {documents.numbers[places[encoded.losses[0].document]]}: tokenizer "
            f"{tokenizer.name} does not keep its text: {encoded.losses[0]}; use --tokenizer bytes or bpe, or accept "
            "that losses and bits per byte leave this out: --lossy-tokenizer"
        )
    unknown_tokens = sum(loss.unknown for loss in encoded.losses)
    counted = sum(map(len, texts)), len({loss.document for loss in encoded.losses}), unknown_tokens
    if documents.open_end:
        tokens_N = ids_N
    else:
        ends_D = np.cumsum(lengths_D + 1)
        tokens_N = np.empty(len(ids_N) + len(texts), dtype=np.uint32)
        is_text_N = np.ones(len(tokens_N), dtype=bool)
        is_text_N[ends_D - 1] = False
        tokens_N[is_text_N] = ids_N
        tokens_N[ends_D - 1] = tokenizer.separator
    if documents.continues:
        return Run(tokens_N, [], [], *counted)
    starts_D = np.cumsum(lengths_D + 1) - lengths_D - 1
    return Run(tokens_N, starts_D.tolist(), [documents.numbers[place] for place in places], *counted)
