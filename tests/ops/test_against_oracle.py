"""Every implementation equals the oracle, values and gradients, on random histories.

The CPU kernels always; the Triton kernels where this file runs in Triton's interpreter, see `test_triton_interpreted`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from darlit.ops import fused
from ops import drawn_cases
from ops.drawn_cases import INTERPRETED, NARROW

IMPLEMENTATION = "triton" if INTERPRETED else "cpu"
EXAMPLES = 6 if INTERPRETED else 40


def drawn(examples: int):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return lambda test: settings(max_examples=examples, deadline=None, suppress_health_check=checks)(
        given(case=drawn_cases.cases(widened=not INTERPRETED))(test)
    )


@drawn(EXAMPLES)
def test_float32(case):
    drawn_cases.check(case, IMPLEMENTATION, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@drawn(EXAMPLES // 3)
def test_narrow(case, dtype):
    drawn_cases.check(case, IMPLEMENTATION, dtype)


@pytest.mark.parametrize("width", [1, 64, 97, 1024] + ([] if INTERPRETED else [2049]))
def test_widths(width):
    case = {
        "name": "dar",
        "num_branches": 4,
        "shape": (1, 5, width),
        "options": {},
        "layout": "contiguous",
        "seed": width,
    }
    drawn_cases.check(case, IMPLEMENTATION, torch.float32)


def test_one_source_is_itself():
    x = torch.randn(2, 3, 33)
    logits = torch.randn(6, 2, 1)
    out, lse, spread = fused.depth_read(
        [x, x], [logits], [0], [], torch.tensor([0.3, 0.7]), [0, 1], True, IMPLEMENTATION
    )
    torch.testing.assert_close(out, x)
    torch.testing.assert_close(lse, logits[..., 0])
    torch.testing.assert_close(spread, torch.zeros_like(x))


def test_a_history_of_130_sources():
    """2 L + 2 sources of a 64-layer AttnRes-Full, logits far apart."""
    sources = [torch.randn(1, 3, 20) for _ in range(130)]
    logits = [10 * torch.randn(3, 1, 2) for _ in range(130)]
    out, lse = fused.depth_read(sources, logits, [1] * 130, [], torch.ones(1), [0], True, IMPLEMENTATION)
    table_NS = torch.cat([table[:, :, 1] for table in logits], dim=1)
    expected = torch.einsum("ns,snd->nd", table_NS.softmax(-1), torch.cat(sources))
    torch.testing.assert_close(out[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:, 0], table_NS.logsumexp(-1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad):
    case = {"name": "dar", "num_branches": 4, "shape": (1, 2, 8), "options": {}, "layout": "contiguous", "seed": 0}
    pathway = drawn_cases.pathways.build("dar", num_branches=4, width=8, implementation=IMPLEMENTATION)
    state = pathway.start(torch.randn(case["shape"]))
    for branch in range(4):
        output = state.read(branch).clone()
        output[0, 1, 3] = bad if branch == 1 else 0.0
        state.write(branch, output)
    hidden = state.finish()
    assert not hidden[0, 1].isfinite().all()
    assert hidden[0, 0].isfinite().all()


GATES = ("alpha", "beta", "rho", "pre_", "post_", "res_")
"""A gate is a number or a few, and its gradient a sum over all tokens and channels that nearly cancels."""


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("arm", ["attnres", "dar", "mhc"])
def test_plain_relative_error_at_a_real_width(arm, dtype):
    """No allowance for sums that cancel, but for the gates: there no worse than twice the reference in that dtype."""
    if INTERPRETED and arm == "mhc":
        pytest.skip("mHC has no Triton kernels")
    options = {"attnres": {}, "dar": {"block_size": 2}, "mhc": {"num_streams": 2}}[arm]
    shape = (1, 8 if INTERPRETED else 96, 768)
    case = {"name": arm, "num_branches": 8, "shape": shape, "options": options, "layout": "contiguous", "seed": 1}
    case["parameter_std"] = 0.1  # logits of a few units at this width
    got = drawn_cases.run(case, IMPLEMENTATION, dtype, dtype)
    exact = drawn_cases.run(case, "reference", dtype, torch.float64)
    plain = drawn_cases.run(case, "reference", dtype, dtype)
    for key, wanted in exact.items():
        error, of_reference = (((of[key].double() - wanted).norm() / wanted.norm()).item() for of in (got, plain))
        gate = any(name in key for name in GATES)
        allowed = max(drawn_cases.TOLERANCE[dtype], 2 * of_reference if gate else 0)
        assert error <= allowed, f"{key}: {error:.1e}, the reference {of_reference:.1e}"
