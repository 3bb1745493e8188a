"""``darlit prepare``: texts become token chunks that training can trust.

Sources are read in order, their documents tokenized by threads, and the tokens appended, in that same order,
to the litdata chunks of the training and the validation split. How many threads there are, and how often the
preparation was interrupted, never shows in the result.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from darlit.arguments import Parser
from darlit.data.chunks import CHUNK_TOKENS, SplitWriter, token_dtype
from darlit.data.corpus import LICENCE, Holdout, default_folder, standard_library_sources
from darlit.data.encode import SPLITS, DuplicateFilter, SplitRule, read_documents_of
from darlit.data.errors import DataError
from darlit.data.manifest import Manifest, describe_tokenizer, open_manifest, write_manifest
from darlit.data.pipeline import Pipeline, SourceEnd
from darlit.data.progress import Progress
from darlit.data.sources import Source, TextUnit, find_sources
from darlit.data.staging import Staging
from darlit.data.tokenizers import TOKENIZER_FILE, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from darlit.fields import check_fields


@dataclass(frozen=True)
class Options:
    """What decides the content of a prepared folder.

    Args:
        tokenizer: ``bytes``, ``bpe`` (trained here), the path of a ``tokenizer.json``, or a hub id.
        vocab_size: of a trained BPE, separator included.
        sample_megabytes: text that BPE is trained on.
        separator: token of a given tokenizer that ends documents; ``None`` adds an id of its own.
        val_fraction: share of the documents that go to validation, by hash.
        val_start: share of the documents, by the same hash, that are left out: those on which a folder with this
            ``val_fraction`` validates.
        text_field: of jsonl and parquet records.
        text_unit: what a document of a text file is: the ``file``, a ``paragraph`` or a ``line``.
        deduplicate: keep only the first of documents with equal bytes.
        chunk_tokens: tokens a chunk; no sequence can be longer.
        lossy_tokenizer: accept a tokenizer whose ids do not decode to the texts; the folder and every table that a run
            on it is in say so.
    """

    tokenizer: str = "bytes"
    vocab_size: int = 32768
    sample_megabytes: float = 100.0
    separator: str | None = None
    val_fraction: float = 0.05
    val_start: float = 0.0
    text_field: str = "text"
    text_unit: TextUnit = "file"
    deduplicate: bool = False
    chunk_tokens: int = CHUNK_TOKENS
    lossy_tokenizer: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < self.val_fraction < 1.0:
            raise DataError(f"val_fraction {self.val_fraction} is not between 0 and 1; give 0.05 for 5 %")
        if not 0.0 <= self.val_start < 1.0 - self.val_fraction:
            raise DataError(
                f"val_start {self.val_start} leaves nothing to train on; give 0, or a share below "
                f"1 - val_fraction = {1.0 - self.val_fraction:g}"
            )
        if self.chunk_tokens < 2:
            raise DataError(f"chunk_tokens {self.chunk_tokens} is too small; give 2 or more")
        if self.sample_megabytes <= 0:
            raise DataError(f"sample_megabytes {self.sample_megabytes} must be above 0")


def prepare(
    sources: Sequence[str] | Sequence[Source],
    out: str | Path,
    options: Options = Options(),
    *,
    existing: Literal["refuse", "keep", "overwrite"] = "refuse",
    workers: int = 1,
    licence: str | None = None,
    show_progress: bool = False,
) -> Manifest:
    """Tokenize ``sources`` into the folder ``out``.

    Args:
        sources: files, globs, folders and fsspec URLs, or sources found before.
        out: the folder to make. Until it is complete, the work is in ``OUT.partial``.
        existing: what to do when ``out`` is there already; ``keep`` returns it, and waits for another process
            that is making it.
        workers: threads that tokenize.
        licence: note for the manifest.

    Returns:
        The manifest of the finished folder.

    Raises:
        DataError: unusable input or target; finished sources are kept for the next attempt.
    """
    from filelock import FileLock, Timeout

    if workers < 1:
        raise DataError(f"workers {workers} must be at least 1")
    out = Path(out)
    if existing == "keep" and _is_prepared(out):
        return open_manifest(out)
    with _errors_of_disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out.with_name(f".{out.name}.lock"))
        try:
            with lock.acquire(timeout=-1 if existing == "keep" else 0):
                if existing == "keep" and _is_prepared(out):
                    return open_manifest(out)
                if existing == "refuse" and out.exists() and (not out.is_dir() or any(out.iterdir())):
                    raise DataError(f"{out} exists and is not empty; give another --out, or add --overwrite")
                return _Preparation(sources, out, options, existing, licence).run(workers, show_progress)
        except Timeout as error:
            raise DataError(f"{out}: another darlit prepare is writing it; wait for it to end") from error


def default_options(tokenizer: str, holdout: Holdout = "validation") -> Options:
    """How the default corpus is prepared; its 12 MB carry a small vocabulary only.

    ``holdout`` ``screening`` leaves out the documents that ``validation`` holds out and holds out as many others.
    """
    options = Options(tokenizer=tokenizer, vocab_size=4096)
    return replace(options, val_start=options.val_fraction) if holdout == "screening" else options


def prepare_default(tokenizer: str = "bytes", holdout: Holdout = "validation", *, show_progress: bool = False) -> Path:
    """The default corpus's folder in the cache, prepared unless it is there. ``tokenizer``: bytes or bpe."""
    folder = default_folder(tokenizer, holdout)
    if not _is_prepared(folder):
        prepare(
            standard_library_sources(),
            folder,
            default_options(tokenizer, holdout),
            existing="keep",
            licence=LICENCE,
            show_progress=show_progress,
        )
    return folder


def _is_prepared(folder: Path) -> bool:
    return (folder / "manifest.json").exists()


@contextlib.contextmanager
def _errors_of_disk(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise DataError(
            f"{where}: {error.strerror or error}; what is done is kept: fix it and rerun the same command"
        ) from error


class _Preparation:
    """One call of ``prepare`` under its lock."""

    def __init__(
        self,
        sources: Sequence[str] | Sequence[Source],
        out: Path,
        options: Options,
        existing: str,
        licence: str | None,
    ) -> None:
        self.options = options
        self.licence = licence
        self.notes: list[str] = []
        self.sources, self.left_out = _find(sources, self.notes)
        self.within_one_text = len(self.sources) == 1 and self.sources[0].kind == "text" and options.text_unit == "file"
        self.tokenizer = None if options.tokenizer == "bpe" else load_tokenizer(options.tokenizer, options.separator)
        plan = {
            "options": asdict(options),
            "tokenizer": self.tokenizer.sha256 if self.tokenizer else None,
            "within_one_text": self.within_one_text,
        }
        self.staging = Staging(out, plan, self.sources, restart=existing != "refuse")
        self.rule = SplitRule(options.val_fraction, options.val_start)

    def run(self, workers: int, show_progress: bool) -> Manifest:
        total = sum(source.size for source in self.sources)
        try:
            with Progress(total, enabled=show_progress) as progress:
                self.tokenizer = self.tokenizer or self._trained_tokenizer(progress)
                dtype = token_dtype(self.tokenizer.vocab_size)
                writers = self.staging.open_writers(dtype, self.options.chunk_tokens)
                try:
                    self._write_all(writers, workers, progress)
                    manifest = self._finish(writers, str(dtype), progress)
                    for note in self._notes():
                        progress.note(note)
                finally:
                    for writer in writers.values():
                        writer.close()
            self.staging.publish()
        finally:
            self.staging.close()
        return Manifest(self.staging.out, manifest.content)

    def _notes(self) -> list[str]:
        """What a user may not expect of these sources."""
        notes = [*self.notes]
        if self.left_out:
            notes.append(f"left out for their endings: {self.left_out}; name these files, or a glob, to take them")
        if self.within_one_text:
            share = f"from {self.rule.val_start:g} to {self.rule.val_start + self.rule.val_fraction:g} of its length"
            notes.append(f"{self.sources[0].name} is one text: {share} it is the validation split")
        return notes

    def _pipeline(self, tokenizer: Tokenizer, duplicates: DuplicateFilter | None = None) -> Pipeline:
        options = self.options
        return Pipeline(
            tokenizer,
            self.rule,
            options.text_field,
            options.text_unit,
            duplicates,
            self.within_one_text,
            options.lossy_tokenizer,
        )

    def _trained_tokenizer(self, progress: Progress) -> Tokenizer:
        path = self.staging.folder / TOKENIZER_FILE
        if path.exists():
            return load_tokenizer(str(path), None, name="bpe")
        progress.say("training BPE")
        tokenizer = train_bpe(self._sample(), self.options.vocab_size)
        temporary = path.with_suffix(".new")
        temporary.write_text(tokenizer.definition or "", encoding="utf-8")
        temporary.replace(path)
        return tokenizer

    def _sample(self) -> Iterator[str]:
        """Training documents from the head of every source, by the sources' sizes."""
        total = max(1, sum(source.size for source in self.sources))
        budget = self.options.sample_megabytes * 1e6
        for source in self.sources:
            left = max(2**16, budget * source.size / total) if budget < total else float("inf")
            for batch in self._pipeline(ByteTokenizer()).reader(source).batches():
                documents = read_documents_of(batch, source, self.options.text_field)
                for text, digest in zip(documents.texts, documents.digests, strict=True):
                    if self.rule.split_of(digest) == "train":
                        left -= len(text)
                        yield text.decode("utf-8", "replace")
                if left <= 0:
                    break

    def _write_all(self, writers: dict[str, SplitWriter], workers: int, progress: Progress) -> None:
        assert self.tokenizer is not None
        duplicates = DuplicateFilter(self.staging.read_digests()) if self.options.deduplicate else None
        first = len(self.staging.done)
        progress.skip(sum(source.size for source in self.sources[:first]))
        pipeline = self._pipeline(self.tokenizer, duplicates)
        for index, result in pipeline.run(self.sources, first, workers):
            if isinstance(result, SourceEnd):
                self.staging.finish_source(asdict(result), writers)
                progress.skip(self.sources[index].size)
                continue
            for split, run in result.items():
                writers[split].write(run.tokens_N, run.starts, index, run.numbers)
            progress.update(pipeline.bytes_read, sum(writer.tokens for writer in writers.values()))

    def _finish(self, writers: dict[str, SplitWriter], dtype: str, progress: Progress) -> Manifest:
        done = self.staging.done
        for split, writer in writers.items():
            if writer.documents == 0:
                self.staging.drop()
                raise DataError(
                    f"no document of {sum(entry['documents'] for entry in done)} fell into the {split} split; "
                    "give more documents, another --val-fraction, or smaller ones with --text-unit"
                )
        assert self.tokenizer is not None
        if self.tokenizer.definition is not None:
            (self.staging.folder / TOKENIZER_FILE).write_text(self.tokenizer.definition, encoding="utf-8")
        splits = {
            split: {
                "tokens": writer.tokens,
                "documents": writer.documents,
                "bytes": sum(entry["text_bytes"][split] for entry in done),
                "chunks": writer.finish(),
            }
            for split, writer in writers.items()
        }
        content = {
            "dtype": dtype,
            "tokenizer": describe_tokenizer(self.tokenizer),
            "lossy": {name: sum(entry[name] for entry in done) for name in ("lossy_documents", "unknown_tokens")},
            "splits": splits,
            "split_rule": self.rule.describe(self.within_one_text),
            "options": asdict(self.options),
            "licence": self.licence,
            "sources": [{key: entry[key] for key in ("path", "bytes", "sha256", "documents")} for entry in done],
            "versions": _versions(),
        }
        progress.say("verifying")
        return write_manifest(self.staging.folder, content)


def _find(sources: Sequence[str] | Sequence[Source], notes: list[str]) -> tuple[list[Source], int]:
    if not sources:
        raise DataError("no sources given; name files, globs, folders or URLs")
    if all(isinstance(source, Source) for source in sources):
        return [source for source in sources if isinstance(source, Source)], 0
    return find_sources([str(source) for source in sources], notes)


def _versions() -> dict[str, str]:
    packages = ("darlit", "numpy", "tokenizers", "litdata")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    """Of an installed package; darlit also runs from a source tree that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _parser() -> argparse.ArgumentParser:
    defaults = Options()
    parser = Parser(
        prog="darlit prepare",
        description="Turn texts into token chunks for training. Interrupted, type the same again to go on.",
    )
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="text, jsonl or parquet files (.gz, .bz2, .xz, .zst too), globs, folders or URLs such as s3://…, "
        "gs://…, hf://…; "
        "without any, the Python standard library's sources",
    )
    parser.add_argument("--out", metavar="FOLDER", help="folder to make; required with SOURCE")
    parser.add_argument(
        "--tokenizer",
        default=defaults.tokenizer,
        help="bytes, bpe (trained on the texts), a tokenizer.json, or a hub id (default: %(default)s)",
    )
    parser.add_argument("--vocab-size", type=int, help=f"of bpe (default: {defaults.vocab_size})")
    parser.add_argument(
        "--sample-megabytes",
        type=float,
        default=defaults.sample_megabytes,
        help="text that bpe is trained on (default: %(default)s)",
    )
    parser.add_argument("--separator", metavar="TOKEN", help="token that ends documents (default: an id of its own)")
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=defaults.val_fraction,
        help="share of documents for validation, chosen by their hash (default: %(default)s)",
    )
    parser.add_argument(
        "--val-start",
        type=float,
        default=defaults.val_start,
        help="share of documents, by the same hash, to leave out: those that another folder of this --val-fraction "
        "validates on (default: %(default)s)",
    )
    parser.add_argument(
        "--text-field", default=defaults.text_field, help="field of jsonl and parquet records (default: %(default)s)"
    )
    parser.add_argument(
        "--text-unit",
        choices=("file", "paragraph", "line"),
        default=defaults.text_unit,
        help="what one document of a text file is (default: %(default)s)",
    )
    parser.add_argument("--deduplicate", action="store_true", help="drop documents with equal bytes but the first")
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=defaults.chunk_tokens,
        help="tokens a chunk; no sequence can be longer (default: %(default)s)",
    )
    parser.add_argument(
        "--lossy-tokenizer",
        action="store_true",
        help="accept a tokenizer that does not keep every text; the folder and every table of its runs say so",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads (default: %(default)s)")
    parser.add_argument("--licence", help="note on the texts' licence, kept in the manifest")
    parser.add_argument("--overwrite", action="store_true", help="replace FOLDER when the new one is complete")
    return parser


def main(argv: list[str]) -> int:
    """The verb ``darlit prepare``: returns the exit status. Raises DataError."""
    arguments = vars(_parser().parse_args(argv))
    sources, out = arguments.pop("sources"), arguments.pop("out")
    workers, licence, overwrite = (arguments.pop(name) for name in ("workers", "licence", "overwrite"))
    if sources and out is None:
        raise DataError("--out FOLDER is required with sources")
    if arguments["vocab_size"] is None:
        arguments["vocab_size"] = (Options() if sources else default_options("bpe")).vocab_size
    options = Options(**arguments)
    if out is None and (options.tokenizer not in ("bytes", "bpe") or options != default_options(options.tokenizer)):
        raise DataError("--out FOLDER is required with options other than --tokenizer bytes or bpe")
    found: Sequence[str] | Sequence[Source] = sources
    if not sources:
        found, licence = standard_library_sources(), licence or LICENCE
    try:
        manifest = prepare(
            found,
            out or default_folder(options.tokenizer),
            options,
            existing="overwrite" if overwrite else "refuse",
            workers=workers,
            licence=licence,
            show_progress=True,
        )
    except KeyboardInterrupt:
        print("darlit prepare: interrupted; type the same again to go on", file=sys.stderr)
        return 130
    for split in SPLITS:
        described = manifest.split(split)
        print(f"{split:5} {described['documents']:>12,} documents {described['tokens']:>15,} tokens")
    if manifest.lossy:
        print(f"lossy: {manifest.lossy}")
    print(f"{manifest.folder}  fingerprint {manifest.fingerprint[:16]}")
    return 0
