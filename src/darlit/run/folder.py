"""The folder of a run, by cell and seed, and the names of what it holds."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darlit.atomic import write_text
from darlit.experiment import size_and_arm
from darlit.run.identity import Recorded, read_recorded

LOCK, WORKER_LOCK = "run.lock", "worker.lock"
"""Held by whoever trains, and by whoever keeps the log and the record of attempts."""


@dataclass(frozen=True)
class Cell:
    """A cell of a grid by its name: ``<size>_<arm>``."""

    name: str

    @property
    def size(self) -> str:
        return size_and_arm(self.name)[0]

    @property
    def arm(self) -> str:
        return size_and_arm(self.name)[1]


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run and the names of what it holds."""

    path: Path

    @classmethod
    def of(cls, runs_dir: str | Path, cell: str, seed: int) -> RunFolder:
        """The folder of a cell under a seed."""
        return cls(Path(runs_dir) / cell / f"seed_{seed}")

    @property
    def config(self) -> Path:
        """The resolved configuration, from which the run can be repeated and its model rebuilt."""
        return self.path / "config.yaml"

    @property
    def record(self) -> Path:
        """The identity, and the number of devices."""
        return self.path / "identity.json"

    @property
    def summary(self) -> Path:
        """Written last, complete or absent: its presence means that the run is done."""
        return self.path / "summary.json"

    @property
    def progress(self) -> Path:
        return self.path / "progress.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        """What ``darlit fit`` printed under ``darlit grid``, all attempts."""
        return self.path / "log.txt"

    @property
    def attempts_file(self) -> Path:
        return self.path / "attempts.jsonl"

    def checkpoint(self, name: str) -> Path:
        """Where the checkpoint ``last``, ``best``, ... lies."""
        return self.checkpoints / f"{name}.ckpt"

    @property
    def is_done(self) -> bool:
        return self.summary.is_file()

    @property
    def has_results(self) -> bool:
        """Whether there is anything that a new run would destroy."""
        return self.is_done or self.checkpoints.exists()

    def start(self, config: str, identity: Mapping[str, Any], devices: int) -> None:
        """Write the configuration (YAML) and the identity, each atomically, before the first step."""
        write_text(self.config, config)
        write_text(self.record, json.dumps({"devices": devices, "identity": dict(identity)}, indent=1) + "\n")

    def recorded(self) -> Recorded | None:
        """What the run was trained as, by its record or its summary; None where the folder does not say."""
        return read_recorded(self.summary) or read_recorded(self.record)

    def clear(self) -> None:
        """Delete the run; its lock and the record of attempts stay."""
        keep = {LOCK, WORKER_LOCK, self.log.name, self.attempts_file.name}
        for entry in self.path.iterdir():
            if entry.name in keep or entry.name.startswith(tuple(f"{lock}." for lock in (LOCK, WORKER_LOCK))):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def note(self, **event: Any) -> None:
        """Append an event to the record of attempts."""
        with self.attempts_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **event}) + "\n")

    def attempts(self) -> list[dict[str, Any]]:
        """Return the recorded starts and ends, oldest first; a line cut off by a crash is left out."""
        try:
            lines = self.attempts_file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            with suppress(ValueError):
                found.append(json.loads(line))
        return found
