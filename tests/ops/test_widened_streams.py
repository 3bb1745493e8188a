"""Mixtures, projections and gates of widened streams: kernels against the oracle in float64, values and gradients.

The CPU kernels always; the Triton kernels where this file runs in Triton's interpreter, see `test_triton_interpreted`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from darlit.ops import reference
from darlit.ops.dispatch import backend
from ops.drawn_cases import INTERPRETED, TOLERANCE

KERNELS = backend("triton" if INTERPRETED else "cpu")
EXAMPLES = 8 if INTERPRETED else 60
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MARGINS = {"contiguous": 0, "aligned rows": 16, "wide rows": 7}
EPS = 1e-6


def drawn(**strategies):
    checks = [HealthCheck.too_slow]
    run = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=checks)
    sizes = {"tokens": st.integers(1, 70), "width": st.integers(1, 300), "layout": st.sampled_from([*MARGINS])}
    return lambda test: run(given(seed=st.integers(0, 2**16), **{**sizes, **strategies})(test))


class Memory:
    """Rows ``[tokens, width]`` within wider ones, and float32 tables, all NaN where nobody has written."""

    def __init__(self, tokens: int, width: int, dtype: torch.dtype, layout: str = "contiguous", seed: int = 0) -> None:
        self.shape, self.dtype, self.margin = (tokens, width), dtype, MARGINS[layout]
        self.generator = torch.Generator().manual_seed(seed)
        self.buffers: list[Tensor] = []

    def rows(self, count: int, fill: bool = True) -> list[Tensor]:
        tokens, width = self.shape
        made = []
        for _ in range(count):
            self.buffers.append(torch.full((tokens, self.margin + width), torch.nan, dtype=self.dtype))
            made.append(self.buffers[-1][:, self.margin :])
            if fill:
                made[-1].copy_(self.table(tokens, width))
        return made

    def table(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def check(self, got: list[Tensor], exact: list[Tensor]) -> None:
        for ours, theirs in zip(got, exact, strict=True):
            scale = max(theirs.norm().item(), theirs.numel() ** 0.5)
            error = (ours.double().view_as(theirs) - theirs).norm().item() / scale
            assert error <= TOLERANCE[ours.dtype], f"{tuple(ours.shape)} {ours.dtype}: {error:.1e}"
        assert all(buffer[:, : self.margin].isnan().all() for buffer in self.buffers), "written outside of the rows"


def empty(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@drawn(sources=st.integers(1, 9), outputs=st.integers(1, 8), shared=st.booleans())
def test_stream_mix(dtype, tokens, width, layout, seed, sources, outputs, shared):
    memory = Memory(tokens, width, dtype, layout, seed)
    x, g = memory.rows(sources), memory.rows(outputs)
    mixed, dx = memory.rows(outputs, fill=False), memory.rows(sources, fill=False)
    c = memory.table(*(() if shared else (tokens,)), outputs * sources)
    dc, dc_alone = empty(tokens, outputs * sources), empty(tokens, outputs * sources)
    KERNELS.stream_mix(x, c, mixed)
    KERNELS.stream_mix_backward(g, x, c, dx, dc)
    KERNELS.stream_mix_backward(g, x, c, [], dc_alone)

    *exact_x, exact_c = leaves(*x, c.expand(tokens, -1))
    exact = reference.stream_mix(exact_x, exact_c)
    gradients = torch.autograd.grad(exact, [*exact_x, exact_c], [y.double() for y in g])
    memory.check([*mixed, *dx, dc, dc_alone], [*exact, *gradients, gradients[-1]])


@pytest.mark.parametrize("dtype", DTYPES)
@drawn(streams=st.integers(1, 8), hc=st.booleans(), more=st.booleans())
def test_vector_logits(dtype, tokens, width, layout, seed, streams, hc, more):
    """One norm over all streams (mhc) or one a stream with shared weights (hc); ``more``: gradients from elsewhere."""
    memory = Memory(tokens, width, dtype, layout, seed)
    groups, together = (streams, 1) if hc else (1, streams)
    assume(together * width > 1)  # the norm of one channel is its sign: its gradient is rounding alone
    rows = streams + 2 if hc else 2 * streams + streams**2
    x, dx, w = memory.rows(streams), memory.rows(streams, fill=False), memory.table(rows, together, width)
    w /= width**0.5
    logits, scale, dw = empty(groups, tokens, rows), empty(groups, tokens), empty(rows, together, width)
    KERNELS.vector_logits(x, w, EPS, logits, scale)
    g, arrived, c, mixed = (
        memory.table(groups, tokens, rows),
        memory.rows(streams),
        memory.table(tokens, streams),
        memory.rows(1),
    )
    KERNELS.vector_logits_backward(g, logits, scale, x, w, dx, dw, *((arrived, c, mixed[0]) if more else ()))

    *exact_x, exact_w = leaves(*x, w)
    exact, exact_scale = reference.vector_logits(exact_x, exact_w, EPS)
    outputs, gradients = [exact], [g.double().view_as(exact)]
    if more:  # the streams themselves, and one mixture of them
        outputs += [*exact_x, *reference.stream_mix(exact_x, c.double())]
        gradients += [y.double() for y in (*arrived, *mixed)]
    exact_gradients = torch.autograd.grad(outputs, [*exact_x, exact_w], gradients)
    memory.check([logits, scale, *dx, dw], [exact, exact_scale, *exact_gradients])


def gates(memory: Memory, family: str, streams: int, logits: Tensor, parameters: Tensor) -> list[Tensor]:
    """Coefficients, and gradients of logits and parameters for drawn gradients, which come last."""
    tokens = logits.shape[-2]
    pre, write = empty(tokens, streams), empty(tokens, streams * (streams + 1))
    KERNELS.stream_gates(logits, parameters, family, pre, write)
    dpre, dwrite = memory.table(*pre.shape), memory.table(*write.shape)
    dlogits, dparameters = torch.full_like(logits, torch.nan), torch.full_like(parameters, torch.nan)
    KERNELS.stream_gates_backward(dpre, dwrite, logits, parameters, family, dlogits, dparameters)
    return [pre, write, dlogits, dparameters, dpre, dwrite]


def gate_sizes(family: str, streams: int, res: bool, tokens: int) -> tuple[tuple[int, ...], int]:
    """Shape of the logits, and number of parameters."""
    if family == "hc":
        return (streams, tokens, streams + 2), 2 * streams + streams**2 + 2
    rows = 2 * streams + streams**2 * res
    return (tokens, rows), rows + 2 + res


@drawn(streams=st.integers(1, 8), family=st.sampled_from(["hc", "mhc"]), res=st.booleans())
def test_stream_gates(tokens, width, layout, seed, streams, family, res):
    del width, layout
    memory = Memory(tokens, 1, torch.float32, seed=seed)
    shape, count = gate_sizes(family, streams, res, tokens)
    logits, parameters = memory.table(*shape), memory.table(count)
    *got, dpre, dwrite = gates(memory, family, streams, logits, parameters)
    exact_inputs = leaves(logits, parameters)
    exact = reference.stream_gates(*exact_inputs, family, streams)
    gradients = torch.autograd.grad(exact, exact_inputs, [dpre.double(), dwrite.double()])
    memory.check(got, [*exact, *gradients])


@pytest.mark.parametrize("streams", [2, 3, 4, 8])
def test_logits_far_apart_stay_finite_and_doubly_stochastic(streams):
    n = streams
    cross = torch.full((n, n), -60.0)
    cross[0], cross[:, -1] = 60.0, 60.0
    cases = [
        cross,
        -cross,
        60 * torch.eye(n),
        120 * torch.eye(n) - 60,
        torch.full((n, n), -8.0),
        torch.full((n, n), 60.0),
    ]
    memory = Memory(len(cases), 1, torch.float32)
    logits = torch.cat([torch.zeros(len(cases), 2 * n), torch.stack(cases).flatten(1)], dim=1)
    parameters = torch.cat([torch.zeros(2 * n + n * n), torch.ones(3)])
    *got, dpre, dwrite = gates(memory, "mhc", n, logits, parameters)
    assert all(x.isfinite().all() for x in got)
    matrix = got[1].view(-1, n, n + 1)[..., :n]
    torch.testing.assert_close(matrix.sum(-1), torch.ones(len(cases), n), rtol=0, atol=1e-5)
    exact_inputs = leaves(logits, parameters)
    exact = reference.stream_gates(*exact_inputs, "mhc", n)
    gradients = torch.autograd.grad(exact, exact_inputs, [dpre.double(), dwrite.double()])
    for ours, theirs in zip(got, [*exact, *gradients], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_written_stream_o_takes_row_o_of_an_asymmetric_matrix():
    """With numbers: stream 0 gives to stream 1, 1 to 2, 2 to 3, 3 to 0; the output goes to stream 2 alone."""
    shift = torch.eye(4).roll(1, dims=0)
    assert not torch.equal(shift, shift.T)
    post = torch.tensor([-40.0, -40.0, 0.0, -40.0])
    parameters = torch.cat([torch.zeros(4), post, 80 * shift.flatten(), torch.ones(3)])
    pre, write = empty(1, 4), empty(1, 20)
    KERNELS.stream_gates(torch.zeros(1, 24), parameters, "mhc", pre, write)
    streams = [torch.full((1, 5), float(value)) for value in (1, 2, 3, 4)]
    written = [empty(1, 5) for _ in range(4)]
    KERNELS.stream_mix([*streams, torch.full((1, 5), 100.0)], write, written)
    for stream, value in zip(written, (4, 1, 102, 3), strict=True):
        torch.testing.assert_close(stream, torch.full((1, 5), float(value)))


@pytest.mark.parametrize("family", ["hc", "mhc"])
def test_hc_bias_of_res_counts_by_the_written_stream(family):
    """The neighbour of a transposed matrix: a transposed bias, or a logit that is given to the wrong stream."""
    n = 3
    shape, count = gate_sizes(family, n, True, 1)
    logits, parameters = torch.zeros(shape), torch.zeros(count)
    at = 2 * n + 0 * n + 2  # written stream 0 takes from stream 2
    parameters[at] = 50.0
    pre, write = empty(1, n), empty(1, n * (n + 1))
    KERNELS.stream_gates(logits, parameters, family, pre, write)
    matrix = write.view(n, n + 1)[:, :n]
    assert matrix.argmax().item() == 2
    if family == "hc":
        parameters.zero_()[-2] = 1.0
        logits[2, 0, 2 + 0] = 50.0  # what stream 2 says about what it gives to stream 0
        KERNELS.stream_gates(logits, parameters, family, pre, write)
        assert write.view(n, n + 1)[:, :n].argmax().item() == 2
        assert write.count_nonzero() == 1


def test_what_is_not_a_number_shows_in_its_token_alone():
    for family, streams in (("hc", 3), ("mhc", 2), ("mhc", 4)):
        shape, count = gate_sizes(family, streams, True, 5)
        logits = torch.zeros(shape)
        logits[..., 2, -1] = torch.nan
        pre, write = empty(5, streams), empty(5, streams * (streams + 1))
        KERNELS.stream_gates(logits, torch.ones(count), family, pre, write)
        assert [bool(row.isfinite().all()) for row in write] == [True, True, False, True, True]


@pytest.mark.parametrize("hc", [False, True])
def test_gradients_repeat_bit_exactly_and_may_be_written_in_place(hc):
    """More tokens than one program or thread has, so that sums of several are added."""
    memory, streams = Memory(150, 40, torch.float32), 3
    groups, together, rows = (3, 1, 5) if hc else (1, 3, 15)
    x, w = memory.rows(streams), memory.table(rows, together, 40)
    logits, scale = empty(groups, 150, rows), empty(groups, 150)
    KERNELS.vector_logits(x, w, EPS, logits, scale)
    g, arrived = memory.table(groups, 150, rows), memory.rows(streams)
    results = []
    for _ in range(2):
        dx, dw = [y.clone() for y in arrived], torch.full_like(w, torch.nan)
        KERNELS.vector_logits_backward(g, logits, scale, x, w, dx, dw, dx)
        shape, count = gate_sizes("hc" if hc else "mhc", streams, True, 150)
        family = "hc" if hc else "mhc"
        again = Memory(150, 1, torch.float32)
        results.append([*dx, dw, *gates(again, family, streams, logits.view(shape), torch.linspace(-1, 1, count))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    dx = memory.rows(streams, fill=False)
    KERNELS.vector_logits_backward(g, logits, scale, x, w, dx, torch.empty_like(w), arrived)
    assert all(torch.equal(*pair) for pair in zip(results[0], dx, strict=False))
