"""The real dMoE of megablocks against the loop: its Triton kernels in the interpreter, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(
    importlib.util.find_spec("megablocks") is None, reason="megablocks is not installed: make megablocks"
)
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "dropless.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=HERE.parents[2])
    assert result.returncode == 0, result.stdout[-4000:]
    assert "9 passed" in result.stdout
