"""Launches of the depth kernels in a pass: number, variants, what else is dispatched, what they compile to.

In an ordinary process launches are recorded and not run, see `ops.launches`.
"""

from __future__ import annotations

import pytest
import torch

from darlit import pathways
from ops.ahead_of_time import TARGETS
from ops.drawn_cases import INTERPRETED
from ops.launches import FILLS, HOST_TENSORS, WAITS, Launch, Record, recorded

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def a_pass(name: str, branches: int, width: int, dtype: torch.dtype, **options) -> tuple[Record, Record]:
    """What the forward and the backward pass of a pathway alone do."""
    pathway = pathways.build(name, num_branches=branches, width=width, implementation="triton", **options)
    pathway.implementation_for = lambda embedding_BTD, probe: "triton"
    embedding, *outputs = (torch.zeros(1, 64, width, dtype=dtype).requires_grad_() for _ in range(1 + branches))
    with recorded() as forward:
        state, reads = pathway.start(embedding), []
        for branch, output in enumerate(outputs):
            reads.append(state.read(branch))
            state.write(branch, output)
        reads.append(state.finish())
    gradients = [torch.zeros_like(read) for read in reads]
    with recorded() as backward:
        torch.autograd.backward(reads, gradients)
    return forward, backward


@pytest.mark.parametrize(("name", "options"), [("dar", {}), ("dar", {"block_size": 2}), ("attnres", {})])
def test_a_pass_copies_fills_and_waits_for_nothing(name, options):
    """Except for the sum of the queries' gradients, which starts as zeros once a pass, and the constant shares."""
    branches = 12
    forward, backward = a_pass(name, branches, 64, torch.float32, **options)
    assert not forward.of(*HOST_TENSORS, *WAITS)
    assert not backward.of(*HOST_TENSORS, *WAITS)
    assert len(forward.of(*FILLS)) <= (name == "attnres")
    # One sum of queries; autograd stacks the gates' gradients of one table and fills what the others lack.
    assert backward.of("aten.zeros_like") == ["aten.zeros_like.default"]
    kernels = forward.kernels()
    entries = 1 + sum(map(state_blocks(name, branches, **options), range(branches)))
    assert kernels.count("depth_read_kernel") == branches
    assert kernels.count("stream_write_kernel") == 1 + branches
    prefetches = kernels.count("depth_prefetch_kernel")
    mixes = kernels.count("store_source_kernel") - entries  # a table of one for each read that has mixes
    assert mixes >= 2 * prefetches
    assert len(kernels) == 1 + 2 * branches + entries + mixes + prefetches
    kernels = backward.kernels()
    assert kernels.count("stream_write_backward_kernel") == 1 + branches
    assert kernels.count("store_record_kernel") == branches
    assert len(kernels) == 1 + 3 * branches


def state_blocks(name, branches, **options):
    return pathways.build(name, num_branches=branches, width=8, **options).layout.blocks.ends


@pytest.mark.parametrize(("name", "options"), [("dar", {}), ("dar", {"block_size": 2}), ("attnres", {})])
def test_a_deeper_model_compiles_nothing_more(name, options):
    """One compilation for a kernel, dtype and width, whatever the number of sources and reads."""
    variants = []
    for branches in (16, 32):
        forward, backward = a_pass(name, branches, 64, torch.bfloat16, **options)
        variants.append({launch.variant() for launch in forward.launches + backward.launches})
    assert variants[0] == variants[1]


ROWS = {
    "depth_read_kernel": lambda k: k["J"] + k["J"] * k["SPREADS"] + (not k["SPREADS"]),  # values; x and the spreads
    "depth_read_backward_kernel": lambda k: 1 + k["J"],  # the gradient, x, the spreads
    "depth_read_backward_from_sources_kernel": lambda k: 1 + k["S"] * k["J"],
    "stream_write_kernel": lambda k: k["M"] * (k["CARRIED"] + k["OUTPUT"]) + k["OUTPUT"],
    # x, what arrived, a read's gradient; the output, carried streams, and the gradients of both.
    "stream_write_backward_kernel": lambda k: (
        k["M"] + k["ARRIVED"].bit_count() + 1
        + k["OUTPUT"] * (1 + k["CARRIED"]) + k["M"] * k["CARRIED"] * (1 + k["RHO"])
    ),
}  # fmt: skip
"""Rows of a stream that a program must move in one pass of every loop."""


def floor(launch: Launch, element: int) -> int:
    k = launch.keywords
    if launch.name == "depth_prefetch_kernel":
        return (1 + k["READS"]) * k["BLOCK"] * element
    queries = k["J"] * 4 * k["BLOCK"] if launch.name.startswith("stream_write") else 0
    return ROWS[launch.name](k) * k["TOKENS"] * k["BLOCK"] * element + queries


def compile_pass(name, options, width, dtype, target, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4" if target == "gfx942" else None)
    forward, backward = a_pass(name, 20, width, DTYPES[dtype], **options)
    launches = {launch.variant(): launch for launch in forward.launches + backward.launches}
    for launch in launches.values():
        compiled = launch.compile(target)
        assert compiled.spills == 0, launch.name
        if launch.name.startswith("store_"):
            continue
        assert compiled.narrow_accesses() == 0, launch.name
        least = floor(launch, {"bf16": 2, "fp32": 4}[dtype])
        assert least <= compiled.moved() <= 1.3 * least, (launch.name, compiled.moved() / least)


def test_dar_compiles_without_spills_at_the_floor(monkeypatch):
    compile_pass("dar", {}, 2048, "bf16", "sm_90", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [768, 2048, 4096])
@pytest.mark.parametrize(("name", "options"), [("dar", {}), ("dar", {"block_size": 2}), ("attnres", {})])
@pytest.mark.parametrize("target", TARGETS)
def test_every_pass_compiles_without_spills_at_the_floor(target, name, options, width, dtype, monkeypatch):
    compile_pass(name, options, width, dtype, target, monkeypatch)
