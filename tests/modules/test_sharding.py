"""Sharded training is training: the same initial values, losses, gradients and steps as one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import darlit
from backbone.expert_exchange import KINDS, ROUTES, expected
from modules.sharded_steps import CASES, CLIP, RECOMPUTED, STEPS, train

TESTS = Path(__file__).parent.parent


def run_ranks(world: int, program: str, *arguments: Any, timeout: float = 600) -> None:
    """Run a program of tests/modules once for each rank, all on this machine; all must end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(Path(darlit.__file__).parent.parent)]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(TESTS / "modules" / program), str(world), *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            command,
            env={**variables, "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-4000:]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks did in every case."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(2, "sharded_steps.py", out)
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@cache
def one_process(case: str, precision: str = "32-true", steps: int = STEPS, parts: int = 2) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(case, 0, 1, precision, steps, parts=parts)


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-9) -> None:
    """Relative difference of whole tensors."""
    difference = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert difference <= tolerance, f"{what}: {difference:.2e}"


def assert_same_steps(single: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    actual = ranks[0]
    assert len(single["steps"]) == len(actual["steps"]) == STEPS
    for number, step in enumerate(single["steps"]):
        losses = torch.stack([rank["steps"][number]["losses"][0] for rank in ranks])
        assert_close(losses, torch.stack(step["losses"]), f"losses of step {number}")
        assert_close(actual["steps"][number]["norm"], step["norm"], f"norm of step {number}", 1e-6)  # logged in float32
        gradients = actual["steps"][number]["gradients"]
        assert gradients.keys() == step["gradients"].keys()
        for parameter, gradient in step["gradients"].items():
            assert_close(gradients[parameter], gradient, f"gradient of {parameter} in step {number}", 1e-7)
    assert single["steps"][0]["norm"] > CLIP, "nothing is clipped: the test would not see it"
    for parameter, value in single["final"].items():
        assert_close(actual["final"][parameter], value, parameter, 1e-7)


NAMES = [
    *(case for case in CASES if case != "dar_apart"),
    *(f"{case} recomputed" for case in RECOMPUTED),
    "moe_dar_block split, recomputed",
]
"""The last with experts split over the two ranks."""


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_take_the_steps_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    """Also with activation checkpointing, which one process does without."""
    assert_same_steps(one_process(name.split()[0]), [rank[name] for rank in ranks])


@pytest.mark.parametrize("name", NAMES)
def test_initial_values_are_those_of_one_process_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    """And no rank holds one that another holds."""
    single, actual = one_process(name.split()[0])["initial"], ranks[0][name]["initial"]
    assert single.keys() == actual.keys()
    for parameter, value in single.items():
        assert torch.equal(actual[parameter], value), parameter
    assert sum(rank[name]["held"] for rank in ranks) == sum(value.numel() for value in single.values())


def test_matrices_travel_as_bf16_and_the_pathway_computes_in_float32(ranks: list[dict[str, Any]]) -> None:
    """The first step's gradients are bit for bit those of one process under autocast, the pathway's among them."""
    single, actual = one_process("dar_block", "bf16-mixed", 1)["steps"][0], ranks[0]["dar_block bf16"]["steps"][0]
    for parameter, gradient in single["gradients"].items():
        assert torch.equal(actual["gradients"][parameter], gradient), parameter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
def test_tokens_come_back_from_experts_on_other_ranks(ranks: list[dict[str, Any]], route: str, kind: str) -> None:
    """Outputs and gradients are one process's, also where ranks need disjoint experts or a rank gets no token."""
    names = ("output", "x", "weights", "gate", "up", "out")
    for rank, tensors in zip(ranks, expected(route, kind), strict=True):
        for name, actual, one in zip(names, rank["exchange"][f"{route}, {kind}"], tensors, strict=True):
            assert actual.shape == one.shape
            assert_close(actual, one, name, 1e-6 if kind == "grouped" else 1e-12)


@pytest.mark.slow
def test_experts_split_over_two_ranks_and_sharded_over_two_more(tmp_path: Path) -> None:
    run_ranks(4, "sharded_steps.py", tmp_path)
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)["moe_dar_block"] for rank in range(4)]
    single = one_process("moe_dar_block", parts=4)
    assert_same_steps(single, found)
    assert all(torch.equal(found[0]["initial"][name], value) for name, value in single["initial"].items())
