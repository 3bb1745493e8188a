"""What a run ran on: device, memory, package versions, git revision."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("darlit", "torch", "lightning", "torchmetrics", "litdata", "jsonargparse", "tensorboard", "triton")


def hardware() -> dict[str, Any]:
    """Device name, CPU cores this process may use, memory in GiB, number of GPUs."""
    gpus = torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "device": torch.cuda.get_device_name(0) if gpus else _cpu_name(),
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held since `reset_peak_memory`: allocated on the GPU, or resident in this process on a CPU.

    On a CPU it is this process alone: loader workers and other ranks are not in it. Where there is no ``/proc``, it is
    the peak since the process started.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not ru_maxrss where it can be avoided: a process inherits that from the one that started it.
    if (status := Path("/proc/self/status")).is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak of what this process did before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        with suppress(OSError):  # a container may forbid it: then the peak is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a result depends on; absent ones are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Commit of the checkout that darlit runs from, ``-dirty`` where it was changed; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
