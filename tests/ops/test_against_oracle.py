"""Every implementation equals the oracle, values and gradients, on random histories.

The CPU kernels always; the Triton kernels where this file runs in Triton's interpreter, see `test_triton_interpreted`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from ops import drawn_cases
from ops.drawn_cases import INTERPRETED, NARROW

IMPLEMENTATION = "triton" if INTERPRETED else "cpu"
EXAMPLES = 6 if INTERPRETED else 40


def drawn(examples: int):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return lambda test: settings(max_examples=examples, deadline=None, suppress_health_check=checks)(
        given(case=drawn_cases.cases(widened=True))(test)
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
    """No allowance for sums that cancel. Gates: no worse than three times the reference in that dtype."""
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
        allowed = max(drawn_cases.TOLERANCE[dtype], 3 * of_reference if gate else 0)
        assert error <= allowed, f"{key}: {error:.1e}, the reference {of_reference:.1e}"
