"""Which implementation runs: what was chosen, the fallback, and that autocast, training and evaluation agree."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from darlit import pathways
from darlit.errors import DarlitError
from darlit.ops import cpu, reference
from darlit.ops.dispatch import choose

BRANCHES, WIDTH = 6, 24


def forward(pathway, x, weights, recompute=False):
    """A layer is two branches; with ``recompute`` its activations are made again in the backward pass."""

    def layer(state, first):
        state = state.fork()
        for branch in (first, first + 1):
            state.write(branch, torch.tanh(state.read(branch) @ weights[branch]))
        return state

    state = pathway.start(x)
    for first in range(0, BRANCHES, 2):
        state = checkpoint(layer, state, first, use_reentrant=False) if recompute else layer(state, first)
    return state.finish()


def setup(name="dar", implementation="cpu", **options):
    torch.manual_seed(0)
    pathway = pathways.build(name, num_branches=BRANCHES, width=WIDTH, implementation=implementation, **options)
    for parameter in pathway.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    weights = [(torch.randn(WIDTH, WIDTH) / WIDTH**0.5).requires_grad_() for _ in range(BRANCHES)]
    return pathway, x, weights


def gradients(pathway, x, weights, run):
    loss = run(pathway, x, weights).square().sum()
    return [loss, *torch.autograd.grad(loss, [x, *weights, *pathway.parameters()])]


def count_calls(monkeypatch, calls, module, function, side):
    original = getattr(module, function)

    def call(*arguments, **named):
        calls[side] += 1
        return original(*arguments, **named)

    monkeypatch.setattr(module, function, call)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("implementation", ["auto", "cpu", "reference"])
def test_what_was_chosen_runs(monkeypatch, implementation, training):
    """Spies on both sides, in training and in evaluation."""
    calls = {"cpu": 0, "reference": 0}

    count_calls(monkeypatch, calls, cpu, "depth_read", "cpu")
    count_calls(monkeypatch, calls, reference, "depth_mix", "reference")
    pathway, x, weights = setup(implementation=implementation)
    with torch.set_grad_enabled(training):
        forward(pathway, x, weights)
    ran = "reference" if implementation == "reference" else "cpu"
    assert calls[ran] == BRANCHES  # every read but the first, which has one source, and the final one
    assert sum(calls.values()) == calls[ran]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("implementation", ["auto", "cpu", "reference"])
def test_what_was_chosen_mixes_the_streams(monkeypatch, implementation, training):
    calls = {"cpu": 0, "reference": 0}
    count_calls(monkeypatch, calls, cpu, "stream_mix", "cpu")
    count_calls(monkeypatch, calls, cpu, "vector_logits", "cpu")
    count_calls(monkeypatch, calls, reference, "depth_mix", "reference")
    pathway, x, weights = setup("mhc", implementation, num_streams=2)
    with torch.set_grad_enabled(training):
        forward(pathway, x, weights)
    # Reads and, except for the first and the last branch, writes of two streams; or reads, writes and logits.
    expected = {"reference": BRANCHES + 2 * (BRANCHES - 2)} if implementation == "reference" else {"cpu": 3 * BRANCHES}
    assert {side: count for side, count in calls.items() if count} == expected


@pytest.mark.parametrize("name", ["attnres", "dar", "mhc"])
def test_training_and_evaluation_agree(name):
    pathway, x, weights = setup(name)
    with torch.no_grad():
        evaluated = forward(pathway, x, weights)
    assert torch.equal(forward(pathway, x, weights), evaluated)


def test_a_probe_takes_the_reference():
    class Weights(pathways.Probe):
        seen = 0

        def depth_weights(self, read, target, weights_BTS):
            self.seen += 1

    pathway, x, _ = setup()
    probe = Weights()
    state = pathway.start(x, probe)
    for branch in range(BRANCHES):
        state.write(branch, state.read(branch))
    state.finish()
    assert probe.seen == 2 * (BRANCHES + 1)


@pytest.mark.parametrize("name", ["attnres", "dar", "mhc"])
def test_recomputation_changes_nothing(name):
    pathway, x, weights = setup(name)
    plain = gradients(pathway, x, weights, forward)
    again = gradients(pathway, x, weights, lambda *given: forward(*given, recompute=True))
    for one, two in zip(plain, again, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_autocast_leaves_statistics_alone():
    pathway, x, weights = setup()
    expected = forward(*setup(implementation="reference"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = forward(pathway, x, weights)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_what_cannot_be_served_is_refused():
    assert choose("auto", "cpu", torch.float64) == "reference"
    assert choose("auto", "cuda", torch.float64) == "reference"
    assert choose("auto", "cuda", torch.bfloat16) == "triton"
    assert choose("auto", "cuda", torch.bfloat16, ("auto", "reference", "cpu")) == "reference"
    with pytest.raises(DarlitError, match="cannot serve"):
        choose("triton", "cuda", torch.bfloat16, ("auto", "reference", "cpu"))
    with pytest.raises(DarlitError, match="cannot serve"):
        choose("cpu", "cpu", torch.float64)
    with pytest.raises(DarlitError, match="choose one of"):
        choose("fast", "cpu", torch.float32)
    with pytest.raises(DarlitError, match="implementation='cpu' is not allowed"):
        pathways.build("residual", num_branches=2, width=4, implementation="cpu")


def test_without_a_compiler_it_says_so_once(tmp_path):
    program = (
        "import torch, warnings\n"
        "from darlit.ops.dispatch import choose\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    assert [choose('auto', 'cpu', torch.float32) for _ in range(3)] == ['reference'] * 3\n"
        "messages = [str(w.message) for w in caught if 'fast CPU paths are off' in str(w.message)]\n"
        "assert len(messages) == 1, messages\n"
    )
    environment = {**os.environ, "CXX": "no-such-compiler", "DARLIT_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


@pytest.mark.slow
def test_two_processes_build_at_once(tmp_path):
    program = "from darlit.ops.cpu_build import library; assert library() is not None"
    environment = {**os.environ, "DARLIT_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
