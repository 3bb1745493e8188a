"""Build the C++ kernels of this folder for this machine when they are first needed, and load them.

The library is plain C++ behind a C interface: no PyTorch header, no pip package, one compiler call of a few seconds.
It is kept under ``DARLIT_CACHE`` (default ``~/.cache/darlit``) in a file named after everything it depends on: the
source, the compiler, the processor's features and PyTorch with its OpenMP. A folder shared by different machines is
therefore safe, and so are processes that start at once: each builds into a file of its own and renames it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

SOURCES = [Path(__file__).with_name(name) for name in ("depth.cpp", "gates.cpp", "streams.cpp")]
HEADERS = [Path(__file__).with_name("rows.h")]
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None (said once, with the reason) where it cannot be built."""
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
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
    code = [path.read_text() for path in (*SOURCES, *HEADERS)]
    for part in (*code, _version(compiler), _features(), torch.__version__, str(openmp), *FLAGS):
        key.update(part.encode() + b"\0")
    folder = Path(os.environ.get("DARLIT_CACHE", Path.home() / ".cache" / "darlit"))
    built = folder / f"kernels-{key.hexdigest()[:20]}.so"
    if built.exists():
        return built

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / built.name
        # The OpenMP that PyTorch has loaded is linked by its path: two of them would fight over the cores.
        parallel = ["-fopenmp", f"-Wl,--no-as-needed,{openmp}"] if openmp else []
        command = [compiler, *FLAGS, *parallel, *map(str, SOURCES), "-o", str(fresh)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {result.stderr}")
        fresh.replace(built)
    return built


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError(f"CXX={asked!r} is not a program" if asked else "no C++ compiler found")


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout


def _features() -> str:
    """What ``-march=native`` looks at: the processor's feature flags, and its name where there is no such list."""
    cpuinfo = Path("/proc/cpuinfo")
    wanted = ("flags", "Features", "model name", "CPU part")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})) or platform.processor()


def _openmp() -> Path | None:
    """The GNU OpenMP library that this process has loaded; None: build without threads."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        path = Path(line.split()[-1])
        if path.name.startswith("libgomp"):
            return path
    return None
