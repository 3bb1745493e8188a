"""Run folders: where the runs of a grid lie, and the summaries that the finished ones hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from darlit.grid.summary import Summary, SummaryError, read_summary
from darlit.run import RunFolder

# Orders in which tables and figures list what they hold; a name that is not here follows in alphabetical order.
SIZES = ("tiny", "small", "dense0.1b", "dense0.3b", "dense0.5b", "dense1b", "moe7b")
ARMS = (
    "residual",
    "transparent",
    "denseformer",
    "attnres_full",
    "attnres_block",
    "attnres_2q",
    "attnres_sep_v",
    "hc2",
    "mhc2",
    "mhc4",
    "dar_full",
    "dar_block",
    "dar",
    "dar_self_kv",
    "dar_cross_v",
    "dar_fixed_kv",
)

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
    """Sort key of a size."""
    return (SIZES.index(size) if size in SIZES else len(SIZES), size)


def arm_order(arm: str) -> tuple[int, str]:
    """Sort key of an arm."""
    return (ARMS.index(arm) if arm in ARMS else len(ARMS), arm)


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
