"""The Triton kernels against the oracle, in Triton's interpreter and therefore in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def interpret(*selection: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, cwd=HERE.parent.parent
    )
    assert result.returncode == 0, result.stdout[-4000:]


def test_a_few_widths():
    interpret(f"{HERE / 'test_against_oracle.py'}::test_widths", "-k", "97")


def test_two_phases():
    file = HERE / "test_two_phase.py"
    interpret(
        f"{file}::test_mixes_of_wide_rows[5-1027]", f"{file}::test_two_phases_run_where_they_move_less[attnres-True]"
    )


@pytest.mark.slow
def test_everything():
    interpret(str(HERE / "test_against_oracle.py"))


@pytest.mark.slow
def test_everything_of_two_phases():
    interpret(str(HERE / "test_two_phase.py"))
