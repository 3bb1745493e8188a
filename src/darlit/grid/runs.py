"""Run folders: where the runs of a grid lie, and the summaries that the finished ones hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from darlit.catalog import ARMS, SIZES
from darlit.grid.summary import Summary, SummaryError, read_summary
from darlit.run import RunFolder

_SEED = re.compile(r"seed_(\d+)")


@dataclass(frozen=True)
class Run:
    """A finished run and the file that says so."""

    file: Path
    summary: Summary


def find_runs(runs_dir: Path) -> tuple[list[Run], list[Path]]:
    """Return the finished runs below ``runs_dir`` and the run folders that hold no summary yet.

    Reads ``<cell>/seed_<n>/summary.json``, or ``<cell>/seed_<n>.json`` as ``darlit results`` collects them.

    Raises:
        SummaryError: no such folder, a summary that cannot be read, or one that lies in another run's folder.
    """
    if not runs_dir.is_dir():
        raise SummaryError(f"runs folder '{runs_dir}' does not exist; give the folder that 'darlit fit' wrote into")
    finished: list[Run] = []
    unfinished: list[Path] = []
    for cell in sorted(runs_dir.iterdir()):
        if cell.name.startswith(".") or not cell.is_dir():
            continue
        for seed, entry in sorted(_seeds(cell)):
            file = entry if entry.is_file() else RunFolder(entry).summary
            if file.is_file():
                finished.append(_read(file, cell.name, seed))
            else:
                unfinished.append(entry)
    return finished, unfinished


def size_order(size: str) -> tuple[int, str]:
    """Sort key of a size: its place in `darlit.catalog.SIZES`, others after them by name."""
    return (SIZES.index(size) if size in SIZES else len(SIZES), size)


def arm_order(arm: str) -> tuple[int, str]:
    """Sort key of an arm: its place in `darlit.catalog.ARMS`, others after them by name."""
    return (list(ARMS).index(arm) if arm in ARMS else len(ARMS), arm)


def _seeds(cell: Path) -> list[tuple[int, Path]]:
    found = []
    for entry in cell.iterdir():
        match = _SEED.fullmatch(entry.name.removesuffix(".json") if entry.is_file() else entry.name)
        if match:
            found.append((int(match[1]), entry))
    return found


def _read(file: Path, cell: str, seed: int) -> Run:
    summary = read_summary(file)
    for field, expected in (("cell", cell), ("seed", seed)):
        if summary[field] != expected:  # type: ignore[literal-required]
            raise SummaryError(
                f"{file}: says {field} {summary[field]!r}, its folder says {expected!r}; "  # type: ignore[literal-required]
                "move it back to the folder it was written in"
            )
    return Run(file, summary)
