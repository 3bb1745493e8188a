"""Launches of a branch of widened streams: number, variants, what else is dispatched, what they compile to.

In an ordinary process launches are recorded and not run; in Triton's interpreter, see `test_triton_interpreted`, they
run and are counted.
"""

from __future__ import annotations

import pytest
import torch

from darlit.ops import triton_kernels
from ops.ahead_of_time import TARGETS
from ops.drawn_cases import INTERPRETED
from ops.launches import Launch, Record, recorded

STREAM_BYTES = {"bf16": 2, "fp32": 4}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
recorded_only = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

FORWARD = ["vector_logits_kernel", "stream_gates_kernel", "stream_mix_kernel", "stream_mix_kernel"]
BACKWARD = [
    "stream_mix_backward_kernel",
    "stream_mix_backward_kernel",
    "stream_gates_backward_kernel",
    "vector_logits_backward_kernel",
]


def branch(family: str, n: int, dtype: torch.dtype, tokens: int = 64, width: int = 2048, offset: int = 0) -> Record:
    """Forward and backward of a branch as `darlit.ops.streams` calls the kernels; outputs exist beforehand."""

    def rows(count: int) -> list[torch.Tensor]:
        return [torch.zeros(tokens, width + offset, dtype=dtype)[:, offset:] for _ in range(count)]

    together, of_streams = (n, 2 * n + n * n) if family == "mhc" else (1, n + 2)
    streams, (output, mixed, g), weights = rows(n), rows(3), torch.zeros(of_streams, together, width)
    logits, scale = torch.zeros(n // together, tokens, of_streams), torch.zeros(n // together, tokens)
    parameters = torch.zeros(2 * n + n * n + (3 if family == "mhc" else 2))
    pre, write = torch.zeros(tokens, n), torch.zeros(tokens, n * (n + 1))
    written, arrived, source_gradients = rows(n), rows(n), rows(n + 1)
    of_logits, of_parameters, of_weights = map(torch.zeros_like, (logits, parameters, weights))
    of_pre, of_write = torch.zeros_like(pre), torch.zeros_like(write)
    kernels = triton_kernels
    with recorded() as record:
        kernels.vector_logits(streams, weights, 1e-6, logits, scale)
        kernels.stream_gates(logits, parameters, family, pre, write)
        kernels.stream_mix(streams, pre, [mixed])
        kernels.stream_mix([*streams, output], write, written)
        kernels.stream_mix_backward(arrived, [*streams, output], write, source_gradients, of_write)
        kernels.stream_mix_backward([g], streams, pre, [], of_pre)
        kernels.stream_gates_backward(of_pre, of_write, logits, parameters, family, of_logits, of_parameters)
        kernels.vector_logits_backward(
            of_logits, logits, scale, streams, weights, written, of_weights, source_gradients[:n], pre, g
        )
    return record


@pytest.mark.parametrize("family", ["mhc", "hc"])
def test_a_branch_is_eight_launches_and_two_sums(family):
    """Nothing is copied to the device, filled or waited for, so a step can be captured in a CUDA graph."""
    record = branch(family, 4, torch.float32, tokens=40, width=72)
    assert record.kernels() == FORWARD + BACKWARD
    record.assert_only_launches()
    assert record.operators == ["aten.new_empty.default", "aten.sum.IntList_out"] * 2


def test_what_must_not_be_dispatched_is_seen():
    with recorded() as record:
        torch.tensor([1, 2])
    with pytest.raises(AssertionError, match="lift_fresh"):
        record.assert_only_launches()
    for call in (lambda: torch.zeros(3), lambda: torch.ones(()).item(), lambda: torch.empty(2).fill_(1.0)):
        with recorded() as record:
            call()
        with pytest.raises(AssertionError, match="aten"):
            record.assert_only_launches()


@recorded_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_variant_a_kernel_whatever_the_number_of_tokens(dtype):
    """Eight: `stream_mix` and its backward are each called for one output and for n."""
    seen = set()
    for tokens in (1, 16, 100, 2048):
        for offset in (0, 16, 48):
            record = branch("mhc", 2, DTYPES[dtype], tokens, 64, offset)
            seen |= {launch.variant() for launch in record.launches}
    assert len(seen) == len(FORWARD + BACKWARD)
    unaligned = {launch.variant() for launch in branch("mhc", 2, DTYPES[dtype], 100, 64, offset=3).launches}
    assert len(unaligned - seen) == len(FORWARD + BACKWARD) - 2  # the gates see no stream
    assert len(seen | {launch.variant() for launch in branch("mhc", 2, DTYPES[dtype], 16, 128).launches}) > len(seen)


def floor(launch: Launch, element: int) -> int:
    """Bytes that a program must move in one pass of its loop; rows of weights with their padding."""
    k = launch.keywords
    tokens, padded = k["TOKENS"], k.get("PADDED", k.get("ROWS", 0))
    tile = tokens * k.get("BLOCK", 0) * element
    if launch.name == "stream_mix_kernel":
        return (k["S"] + k["O"]) * tile + 4 * tokens * k["O"] * k["S"]
    if launch.name == "stream_mix_backward_kernel":
        gradients = k["GRADIENTS"]
        return (k["O"] + (1 + gradients) * k["S"]) * tile + 4 * tokens * k["O"] * k["S"] * (1 + gradients)
    if launch.name == "vector_logits_kernel":  # x, w; logits, scale
        return tile + 4 * padded * k["BLOCK"] + 4 * tokens * (padded + 1)
    if launch.name == "vector_logits_backward_kernel":  # x, arrived, g, dx; w, dw; logits, gradient; two scalars
        return 4 * tile + 2 * 4 * padded * k["BLOCK"] + 4 * tokens * (2 * padded + 2)
    passes = 2 if launch.name == "stream_gates_kernel" else 3  # in, out, and what comes from behind
    return passes * 4 * tokens * (2 * padded + padded**2)


def compile_branch(family: str, n: int, dtype: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4" if target == "gfx942" else None)
    for launch in branch(family, n, DTYPES[dtype]).launches:
        compiled, least = launch.compile(target), floor(launch, STREAM_BYTES[dtype])
        assert compiled.spills == 0, launch.name
        assert compiled.narrow_accesses() == 0, launch.name
        assert least <= compiled.moved() <= 1.3 * least, launch.name


@recorded_only
def test_a_branch_compiles_without_spills_at_the_floor(monkeypatch):
    compile_branch("mhc", 4, "bf16", "sm_90", monkeypatch)


@recorded_only
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("family", ["mhc", "hc"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_branch_compiles_without_spills_at_the_floor(target, family, n, dtype, monkeypatch):
    compile_branch(family, n, dtype, target, monkeypatch)
