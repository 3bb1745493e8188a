"""The folder in which a preparation works: what it set out to do, how far it is, and how it ends.

``OUT.partial`` beside the target holds ``plan.json`` (the options) and ``progress.jsonl`` (one line a
finished source with the writers' places). The target appears by one rename, when everything is verified; until
then nothing opens. The same preparation typed again goes on after the last finished source.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from darlit.atomic import write_text
from darlit.data.chunks import SplitWriter
from darlit.data.encode import SPLITS
from darlit.data.errors import DataError
from darlit.data.manifest import partial_folder
from darlit.data.sources import DIGEST_BYTES, Source
from darlit.data.tokenizers import TOKENIZER_FILE

PLAN_FILE = "plan.json"
PROGRESS_FILE = "progress.jsonl"
DIGESTS_FILE = "digests.bin"


class Staging:
    """The working folder of one preparation.

    Args:
        out: the target folder.
        plan: the options that decide what is written; JSON.
        sources: what is to be read. Finished sources that changed since, and all after them, are read again.
        restart: drop an unfinished preparation with another plan instead of raising.

    Raises:
        DataError: an unfinished preparation with another plan that has finished a source. One that has not is dropped:
            nothing is lost, and an error may have named the option that is now another one.
    """

    def __init__(self, out: Path, plan: dict[str, Any], sources: Sequence[Source], *, restart: bool) -> None:
        self.out = out
        self.sources = [asdict(source) for source in sources]
        self.folder = partial_folder(out)
        self.done: list[dict[str, Any]] = []
        if self.folder.exists() and not self._has_plan(plan):
            if (self.folder / PLAN_FILE).exists() and self._lines() and not restart:
                raise DataError(
                    f"{self.folder} holds an unfinished preparation with other options; type those again to "
                    "finish it, or add --overwrite to start over"
                )
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / PLAN_FILE).exists():
            self.done = self._finished_sources()
        else:
            write_text(self.folder / PLAN_FILE, json.dumps(plan))
        self._progress = (self.folder / PROGRESS_FILE).open("w", encoding="utf-8")
        for entry in self.done:
            self._write_entry(entry)

    def open_writers(self, dtype: np.dtype[Any], chunk_tokens: int) -> dict[str, SplitWriter]:
        """The two splits' writers, at the place where the last finished source left them."""
        places = self.done[-1]["places"] if self.done else dict.fromkeys(SPLITS, (0, 0))
        return {split: SplitWriter(self.folder / split, dtype, chunk_tokens, *places[split]) for split in SPLITS}

    def read_digests(self) -> list[bytes]:
        """Digests of the documents kept so far, where duplicates are removed."""
        path = self.folder / DIGESTS_FILE
        count = sum(entry["digests"] for entry in self.done)
        raw = path.read_bytes()[: count * DIGEST_BYTES] if path.exists() else b""
        path.write_bytes(raw)
        return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]

    def finish_source(self, entry: dict[str, Any], writers: dict[str, SplitWriter]) -> None:
        """Write down that a source is done (``pipeline.SourceEnd``); from here on it is not read again."""
        for writer in writers.values():
            writer.flush()
        digests = bytes.fromhex(entry["digests"])
        if digests:
            with (self.folder / DIGESTS_FILE).open("ab") as file:
                file.write(digests)
        entry = {
            **entry,
            "source": self.sources[len(self.done)],
            "digests": len(digests) // DIGEST_BYTES,
            "places": {split: (writer.tokens, writer.documents) for split, writer in writers.items()},
        }
        self._write_entry(entry)
        self.done.append(entry)

    def publish(self) -> None:
        """Give the finished folder its name; an older target is removed only after that."""
        self._progress.close()
        old = self.out.with_name(f"{self.out.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        if self.out.exists():
            self.out.rename(old)
        self.folder.rename(self.out)
        for name in (PLAN_FILE, PROGRESS_FILE, DIGESTS_FILE):
            (self.out / name).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)

    def drop(self) -> None:
        """Forget what was written: with these options it cannot be finished."""
        self.done = []
        (self.folder / TOKENIZER_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the working folder for the next attempt, if there is anything in it to continue from."""
        self._progress.close()
        if not self.done and not (self.folder / TOKENIZER_FILE).exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write_entry(self, entry: dict[str, Any]) -> None:
        self._progress.write(json.dumps(entry) + "\n")
        self._progress.flush()

    def _has_plan(self, plan: dict[str, Any]) -> bool:
        try:
            return bool(json.loads((self.folder / PLAN_FILE).read_bytes()) == json.loads(json.dumps(plan)))
        except (OSError, ValueError):
            return False

    def _finished_sources(self) -> list[dict[str, Any]]:
        """Entries of the progress log, up to the first cut line or changed source."""
        entries = []
        for line, source in zip(self._lines(), self.sources, strict=False):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if entry["source"] != source:
                break
            entries.append(entry)
        return entries

    def _lines(self) -> list[str]:
        path = self.folder / PROGRESS_FILE
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
