"""Every operator of a depth history against its oracle in float64, on rows that are not contiguous.

The CPU kernels always; the Triton kernels where this file runs in Triton's interpreter, see `test_triton_interpreted`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from darlit.ops import reference
from darlit.ops.depth import Source
from darlit.ops.dispatch import backend
from darlit.ops.rows import rows
from ops.drawn_cases import INTERPRETED, TOLERANCE

IMPLEMENTATION = "triton" if INTERPRETED else "cpu"
ROUTES = {1: [(0,), (0, 0), (0, 0, 0)], 2: [(0, 1), (1, 0), (1, 1), (0,)]}
"""Streams of the targets by how many streams there are: AttnRes with one to three queries; DAR's routes, and sep_v."""
KINDS = [(streams, route) for streams, routes in ROUTES.items() for route in routes]
WIDTHS = (1, 33, 96) if INTERPRETED else (1, 33, 96, 2049)
TOKENS = 5


@pytest.fixture(autouse=True)
def _memory_that_nobody_wrote_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(*shape, dtype=torch.float32, margin=0):
    """``margin``: elements between two rows."""
    return torch.randn(*shape[:-1], shape[-1] + margin)[..., margin:].to(dtype)


def history(count, streams, targets, reads, width, dtype):
    """Sources with logits, and their addresses; the last one is not in the table."""
    sources = []
    for slot in range(count + 1):
        first_read = slot % 3
        source = Source((), first_read, slot, slot)
        source.rows = tuple(rows(drawn(TOKENS, width, dtype=dtype, margin=16)) for _ in range(streams))
        source.logits, source.scale = 3 * torch.randn(TOKENS, targets, reads + 3), torch.rand(TOKENS, streams)
        sources.append(source)
    kernels = backend(IMPLEMENTATION)
    addresses = kernels.SourceAddresses(count, streams, sources[0].rows[0])
    for slot, source in enumerate(sources[:-1]):
        addresses.put(slot, source)
    return SimpleNamespace(kernels=kernels, sources=sources, addresses=addresses)


def exact(tensors):
    return [tensor.double() for tensor in tensors]


def assert_close(got, wanted, dtype):
    assert got.isfinite().all()
    error = (got.double() - wanted).norm() / wanted.norm().clamp(min=wanted.numel() ** 0.5 * 1e-2)
    assert error <= TOLERANCE[dtype], f"{error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_partial", [True, False])
@pytest.mark.parametrize(("streams", "values"), KINDS)
def test_read_and_its_backward(streams, values, with_partial, width, dtype):
    targets, read = len(values), 2
    h = history(4, streams, targets, 3, width, dtype)
    sources = h.sources if with_partial else h.sources[:-1]
    shares = torch.rand(TOKENS, targets).softmax(-1) if targets > 1 else torch.ones(1)
    out, spreads = drawn(TOKENS, width, dtype=dtype), [drawn(TOKENS, width, dtype=dtype) for _ in values[1:]]
    lse, numbers = torch.empty(TOKENS, targets), h.kernels.numbers(values)
    partial = h.sources[-1] if with_partial else None
    h.kernels.depth_read(h.addresses, 4, False, partial, read, streams, shares, numbers, out, spreads, lse)

    logits = exact(source.logits[..., read - source.first_read] for source in sources)
    streams_of = [exact(source.rows) for source in sources]
    x, apart, wanted_lse = reference.depth_read(streams_of, logits, shares.double(), values)
    for ours, theirs in zip([out, *spreads], [x, *apart], strict=True):
        assert_close(ours, theirs, dtype)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)

    gradient = drawn(TOKENS, width, dtype=dtype, margin=16)
    from_output, from_sources = torch.empty(TOKENS, 3 * targets), torch.empty(TOKENS, 3 * targets)
    backward = h.kernels.depth_read_backward
    backward(rows(gradient), out, spreads, [], read, lse, shares, numbers, from_output)
    backward(rows(gradient), None, (), sources, read, lse, shares, numbers, from_sources)
    mixes = []
    for target, stream in enumerate(values):
        alone = torch.eye(targets, dtype=torch.double)[target].expand(TOKENS, targets)
        mixes.append(reference.depth_read(streams_of, logits, alone, values)[0])
        assert stream < streams
    deltas = torch.stack([(gradient.double() * mix).sum(-1) for mix in mixes], dim=-1)
    wanted = torch.cat([wanted_lse, shares.double().expand(TOKENS, targets), deltas], dim=-1)
    scale = gradient.double().norm(dim=-1, keepdim=True) * torch.stack(mixes).norm(dim=-1).amax(0)[:, None]
    for got in (from_output, from_sources):
        assert ((got - wanted).abs() <= 4 * TOLERANCE[dtype] * scale + 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("streams", "values"), KINDS)
@pytest.mark.parametrize("reads", [1, 5, 17])
def test_prefetch(streams, values, width, reads, dtype):
    targets = len(values)
    h = history(6, streams, targets, reads, width, dtype)
    lse = torch.empty(TOKENS, targets, reads)
    mixes = torch.empty(reads * targets, TOKENS, width, dtype=dtype).unbind(0)
    h.kernels.depth_prefetch(h.addresses, 6, range(2, 2 + reads), streams, h.kernels.numbers(values), mixes, lse)
    sources = h.sources[:-1]
    logits = exact(source.logits[..., 2 - source.first_read :][..., :reads] for source in sources)
    wanted, wanted_lse = reference.depth_prefetch([exact(source.rows) for source in sources], logits, values)
    for read in range(reads):
        for target in range(targets):
            assert_close(mixes[read * targets + target], wanted[read][target], dtype)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["enter", "empty", "carried", "exchanged", "exchanged by token"])
@pytest.mark.parametrize(("streams", "keys"), KINDS)
def test_write(streams, keys, kind, width, dtype):
    if streams == 1 and "exchanged" in kind:
        pytest.skip("one stream exchanges nothing")
    reads, all_queries = 3, torch.randn(len(keys), 7, width)
    queries = all_queries[:, 2 : 2 + reads]  # a view: the distance of targets is not that of its rows
    carried = [] if kind == "empty" else [rows(drawn(TOKENS, width, dtype=dtype, margin=16)) for _ in range(streams)]
    output = None if kind == "enter" else rows(drawn(TOKENS, width, dtype=dtype, margin=16))
    rho = {"exchanged": torch.rand(1), "exchanged by token": torch.rand(TOKENS, 1)}.get(kind)
    beta = None if kind == "enter" else torch.rand(TOKENS, streams) if "token" in kind else torch.rand(streams)
    written = [] if output is None else [torch.empty(TOKENS, width, dtype=dtype) for _ in range(streams)]
    logits, scale = torch.empty(TOKENS, len(keys), reads), torch.empty(TOKENS, streams)
    kernels = backend(IMPLEMENTATION)
    kernels.stream_write(carried, output, rho, beta, queries, kernels.numbers(keys), 1e-6, written, logits, scale)
    gates = [None if gate is None else gate.double() for gate in (rho, beta)]
    wanted, _, _ = reference.stream_write(
        exact(carried), None if output is None else output.double(), *gates, queries.double(), keys, 1e-6
    )
    for ours, theirs in zip(written, wanted, strict=bool(written)):
        assert_close(ours, theirs, dtype)
    stored = exact(written or carried)  # logits are of what was stored, rounded
    _, wanted_logits, wanted_scale = reference.stream_write(stored, None, None, None, queries.double(), keys, 1e-6)
    torch.testing.assert_close(logits.double(), wanted_logits, rtol=1e-4, atol=1e-4 * width**0.5)
    torch.testing.assert_close(scale.double(), wanted_scale, rtol=1e-5, atol=1e-5)


def test_a_history_of_130_sources():
    """2 L + 2 sources of a 64-layer AttnRes-Full."""
    h = history(130, 1, 1, 3, 20, torch.float32)
    out, lse = torch.empty(TOKENS, 20), torch.empty(TOKENS, 1)
    h.kernels.depth_read(h.addresses, 130, False, None, 2, 1, torch.ones(1), h.kernels.numbers((0,)), out, (), lse)
    sources = h.sources[:-1]
    logits = [source.logits[..., 2 - source.first_read] for source in sources]
    x, _, wanted_lse = reference.depth_read([source.rows for source in sources], logits, torch.ones(1), (0,))
    torch.testing.assert_close(out, x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse)
