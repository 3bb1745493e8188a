"""The peak memory of a run is its own: not that of the process it was started by, nor of what ran before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from darlit.callbacks.hardware import peak_memory_bytes, reset_peak_memory

CPU = torch.device("cpu")
ANSWER = "import torch; from darlit.callbacks.hardware import peak_memory_bytes as p; print(p(torch.device('cpu')))"

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@linux
def test_the_parent_does_not_count() -> None:
    """ru_maxrss, which a process inherits, would be at least the 1.5 GiB of the parent."""
    large = (
        "import numpy, subprocess, sys; x = numpy.ones(3 * 2**26); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    )
    own, of_large = (
        int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for command in ([sys.executable, "-c", ANSWER], [sys.executable, "-c", large, ANSWER])
    )
    assert of_large == pytest.approx(own, rel=0.1)
    assert of_large < 2**30


@linux
def test_what_ran_before_does_not_count() -> None:
    before = np.ones(2**26)  # 512 MiB
    high = peak_memory_bytes(CPU)
    del before
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) < high - 2**28
    during = np.ones(2**25)
    assert peak_memory_bytes(CPU) > 2**28
    del during
    assert peak_memory_bytes(CPU) > 2**28
