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
    file = HERE / "test_prefetch.py"
    interpret(
        f"{file}::test_two_phases_run_where_they_move_less[attnres-True]", str(HERE / "test_depth.py"), "-k", "not 2049"
    )


@pytest.mark.slow
def test_everything():
    interpret(str(HERE / "test_against_oracle.py"))


@pytest.mark.slow
def test_everything_of_two_phases():
    interpret(str(HERE / "test_prefetch.py"))


def test_a_few_widened_streams():
    file = HERE / "test_widened_streams.py"
    interpret(
        f"{file}::test_written_stream_o_takes_row_o_of_an_asymmetric_matrix",
        f"{file}::test_logits_far_apart_stay_finite_and_doubly_stochastic[3]",
        f"{file}::test_hc_bias_of_res_counts_by_the_written_stream",
        f"{HERE / 'test_launches.py'}::test_a_branch_is_eight_launches_and_two_sums[mhc]",
    )


@pytest.mark.slow
def test_everything_of_widened_streams():
    interpret(str(HERE / "test_widened_streams.py"), str(HERE / "test_launches.py"))
