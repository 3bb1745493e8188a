"""The examples run as they are, and say what is true."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from darlit.pathways import names

FOLDER = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_any_branches(capsys):
    load("any_branches").main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names()


def test_toy_regression_learns_with_both_pathways():
    example = load("toy_regression")
    points = torch.randn(2048, 3, generator=torch.Generator().manual_seed(2))
    variance = example.target(points).var().item()
    errors = example.main(["--steps", "60"])
    assert set(errors) == {"residual", "dar"}
    assert max(errors.values()) < 0.5 * variance


@pytest.fixture(scope="module")
def llama_example():
    return load("llama")


def test_llama_with_the_standard_residual_gives_its_own_logits(llama_example):
    llama, tokens = llama_example.small_llama(), torch.arange(40).remainder(7).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(llama_example.PathwayLlama(llama, "residual")(tokens), llama(tokens).logits)


@pytest.mark.parametrize("name", ["hyper_connections", "mhc", "denseformer", "attnres", "dar"])
def test_llama_with_the_others_starts_as_the_standard_residual_up_to_eps(llama_example, name):
    llama, tokens = llama_example.small_llama().double(), torch.arange(40).remainder(7).view(2, 20)
    for module in llama.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-20  # Llama's own 1e-6 is far from nothing for a mean over sources
    with torch.no_grad():
        own, ours = llama(tokens).logits, llama_example.PathwayLlama(llama, name).double()(tokens)
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_llama_gradients_reach_every_weight_and_the_pathway(llama_example):
    model, tokens = (
        llama_example.PathwayLlama(llama_example.small_llama(), "dar"),
        torch.arange(40).remainder(7).view(2, 20),
    )
    model(tokens).logsumexp(-1).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_llama_main(llama_example, capsys):
    llama_example.main()
    assert len(capsys.readouterr().out.splitlines()) == len(names())
