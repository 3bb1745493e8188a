"""How much memory is free, and how a size is written."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 2**60
"""A limit from here on is none: the first version of control groups has no word for it."""


def readable(size: float) -> str:
    """Bytes in the largest unit that they fill, from KiB to TiB, with three digits."""
    units = ("KiB", "MiB", "GiB", "TiB")
    power = max(i for i in range(len(units)) if i == 0 or size >= 1024 ** (i + 1))
    number = size / 1024 ** (power + 1)
    return f"{number:.3g} {units[power]}" if number < 100 else f"{number:.0f} {units[power]}"


def free_bytes(device: torch.device) -> int:
    """What can still be allocated: of a GPU, or of main memory within the limits of this process's control groups."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_of_the_machine(), *(_of_group(*group) for group in _control_groups())])


def _of_the_machine() -> int:
    """Linux says what it could free up; elsewhere all of main memory."""
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_groups() -> list[tuple[Path, str, str]]:
    """This process's groups and those above: folder, and the files of limit and use (cgroups of version 2 and 1)."""
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.is_file() else []
    groups = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":
            root, files = CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        names = Path(path.lstrip("/")).parts
        # A container sees its own group as the root, whatever its path says.
        groups += [(root.joinpath(*names[:depth]), *files) for depth in range(len(names) + 1)]
    return groups


def _of_group(folder: Path, limit_file: str, use_file: str) -> int:
    limit, used = _number(folder / limit_file), _number(folder / use_file)
    if limit is None or used is None or limit >= UNLIMITED:
        return UNLIMITED
    return max(0, limit - used + _cached_files(folder))


def _cached_files(folder: Path) -> int:
    """Pages of files, which count as used and are given back before memory is refused."""
    statistics = folder / "memory.stat"
    if not statistics.is_file():
        return 0
    fields = dict(line.split() for line in statistics.read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None
