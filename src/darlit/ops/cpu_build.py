"""Build the C++ kernels of this folder for this machine when they are first needed, and load them.

The library is plain C++ behind a C interface: no PyTorch header, no pip package, one compiler call of a few seconds.
It is kept in the cache folder in a file named after everything it depends on: the source, the compiler, the features of
the processor and PyTorch with its OpenMP. A folder shared by different machines is therefore safe, and so are processes
that start at once: each builds into a file of its own and renames it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

from darlit.cache_folder import cache_folder
from darlit.errors import DarlitError

SOURCES = [Path(__file__).with_name(name) for name in ("depth.cpp", "gates.cpp", "streams.cpp")]
HEADERS = [Path(__file__).with_name("rows.h")]
MAPS = Path("/proc/self/maps")
"""What this process has loaded, on Linux."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None (said once, with the reason) where it cannot be built."""
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, RuntimeError, subprocess.SubprocessError, DarlitError) as error:
        detail = " ".join(str(error).split())[:300]
        warnings.warn(
            f"darlit's fast CPU paths are off, the plain PyTorch ones are used ({detail}); results are the same. "
            "Install g++ or clang++, or name one in CXX.",
            stacklevel=2,
        )
        return None


def _build() -> Path:
    compiler = _compiler()
    openmp = _openmp()
    key = hashlib.sha256()
    code = [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
    for part in (*code, _version(compiler), _features(), torch.__version__, str(openmp), *compiler[1:], *FLAGS):
        key.update(part.encode("utf-8", "surrogateescape") + b"\0")
    folder = cache_folder()
    built = folder / f"kernels-{key.hexdigest()[:20]}.so"
    if built.exists():
        return built

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / built.name
        # The OpenMP that PyTorch has loaded is linked by its path: two of them would fight over the cores.
        parallel = ["-fopenmp", "-Xlinker", "--no-as-needed", "-Xlinker", str(openmp)] if openmp else []
        command = [*compiler, *FLAGS, *parallel, *map(str, SOURCES), "-o", str(fresh)]
        result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=300)
        if result.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed: {result.stderr}")
        fresh.replace(built)
    return built


def _compiler() -> list[str]:
    """The compiler and its first arguments: CXX may be a path, blanks included, or a command such as ``ccache g++``."""
    asked = os.environ.get("CXX")
    for command in ([asked], _split(asked)) if asked else (["g++"], ["clang++"], ["c++"]):
        found = shutil.which(command[0]) if command else None
        if found:
            return [found, *command[1:]]
    raise RuntimeError(f"CXX={asked!r} is not a program" if asked else "no C++ compiler found")


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quotation mark without its end
        return []


def _version(compiler: list[str]) -> str:
    command = [*compiler, "--version"]
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=60).stdout


def _features() -> str:
    """What ``-march=native`` looks at: the processor's feature flags, and its name where there is no such list."""
    cpuinfo = Path("/proc/cpuinfo")
    wanted = ("flags", "Features", "model name", "CPU part")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})) or platform.processor()


def _openmp() -> Path | None:
    """The GNU OpenMP library that this process has loaded; None: build without threads."""
    for line in MAPS.read_text(errors="surrogateescape").splitlines() if MAPS.exists() else []:
        # Five columns, then the path, which may hold blanks; most lines have none.
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libgomp"):
            return path
    return None
