"""Reading, tokenizing and putting back in order: from sources to runs of tokens."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from darlit.data.encode import SPLITS, Documents, DuplicateFilter, Run, SplitRule, encode, read_documents_of
from darlit.data.sources import Batch, Source, SourceReader, TextUnit
from darlit.data.tokenizers import Tokenizer

T = TypeVar("T")
R = TypeVar("R")

Runs = dict[str, Run]


@dataclass
class SourceEnd:
    """What became of a source: its size and hash, its documents, their text bytes by split, the documents that the
    tokenizer did not keep and their unknown tokens, and the digests that it added where
    duplicates are removed (hex)."""

    path: str
    bytes: int = 0
    sha256: str = ""
    digests: str = ""
    documents: int = 0
    lossy_documents: int = 0
    unknown_tokens: int = 0
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


@dataclass
class Pipeline:
    """How sources become runs of tokens. ``bytes_read`` counts those of the source that is being read.

    ``within_one_text``: the rule cuts the one source instead of choosing among documents. ``lossy``: see `encode`.
    """

    tokenizer: Tokenizer
    rule: SplitRule
    text_field: str
    text_unit: TextUnit
    duplicates: DuplicateFilter | None = None
    within_one_text: bool = False
    lossy: bool = False
    bytes_read: int = 0

    def run(self, sources: Sequence[Source], first: int, workers: int) -> Iterator[tuple[int, Runs | SourceEnd]]:
        """Yield ``(source's index, result)`` in the sources' order from index ``first`` on.

        A result is the runs of one batch by split, or after a source's last batch its SourceEnd.
        """
        counts = SourceEnd("")
        for index, result in map_in_order(self._encode, self._read(sources, first), workers):
            if isinstance(result, SourceEnd):
                file = {name: getattr(result, name) for name in ("path", "bytes", "sha256", "digests")}
                result, counts = replace(counts, **file), SourceEnd("")
            else:
                for split, run in result.items():
                    counts.documents += len(run.starts)
                    counts.text_bytes[split] += run.text_bytes
                    counts.lossy_documents += run.lossy_documents
                    counts.unknown_tokens += run.unknown_tokens
            yield index, result

    def reader(self, source: Source) -> SourceReader:
        """What reads the documents of a source."""
        split_at = self.rule.split_at if self.within_one_text else ()
        return SourceReader(source, self.text_field, self.text_unit, split_at)

    def _read(
        self, sources: Sequence[Source], first: int
    ) -> Iterator[tuple[int, Source, Batch | Documents | SourceEnd]]:
        for index, source in enumerate(sources[first:], first):
            reader = self.reader(source)
            for batch in reader.batches():
                self.bytes_read = reader.bytes_read
                if self.duplicates is None:
                    yield index, source, batch
                else:  # needs all documents in order, so it cannot wait for the threads
                    yield index, source, self.duplicates(read_documents_of(batch, source, self.text_field))
            digests = self.duplicates.take_digests() if self.duplicates else b""
            yield index, source, SourceEnd(source.name, reader.bytes_read, reader.sha256, digests.hex())

    def _encode(self, job: tuple[int, Source, Batch | Documents | SourceEnd]) -> tuple[int, Runs | SourceEnd]:
        index, source, work = job
        if isinstance(work, SourceEnd):
            return index, work
        if isinstance(work, Batch):
            work = read_documents_of(work, source, self.text_field)
        return index, encode(work, source, self.tokenizer, self.rule, self.lossy)


def map_in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """Results in the items' order, computed by threads that are at most two items each ahead."""
    if workers <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="tokenize") as pool, _one_thread_a_call():
        pending: deque[Future[R]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextlib.contextmanager
def _one_thread_a_call() -> Iterator[None]:
    """Keep ``tokenizers`` from using all cores for each of our threads."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
