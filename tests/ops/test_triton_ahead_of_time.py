"""Every Triton kernel compiles for every target, spills nothing and moves no more than its floor."""

import pytest

from ops import ahead_of_time

FAST = [("sm_90", 2048)]
ALL = [(target, width) for target in ahead_of_time.TARGETS for width in (768, 2048, 4096)]


@pytest.mark.parametrize("kernel", ahead_of_time.KERNELS)
@pytest.mark.parametrize(
    ("target", "width"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in ALL]
)
def test_compiles_without_spills_at_the_floor(kernel, target, width):
    compiled = ahead_of_time.compile_kernel(kernel, target, width, "bf16")
    assert compiled.spills == 0
    # Below the floor the count itself would have missed something.
    assert compiled.floor <= compiled.moved <= 1.3 * compiled.floor


@pytest.mark.parametrize(
    ("target", "width"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in ALL]
)
@pytest.mark.parametrize("reads", [3, 6, 40])
def test_every_bucket_of_reads(target, width, reads):
    compiled = ahead_of_time.compile_kernel("depth_mixes_kernel", target, width, "bf16", reads=reads)
    assert compiled.spills == 0
    assert compiled.floor <= compiled.moved <= 1.3 * compiled.floor


def test_narrow_accesses_are_seen():
    """The count sees scalar accesses as nothing: an unaligned kernel must fail the test above."""
    compiled = ahead_of_time.compile_kernel("depth_read_kernel", "sm_90", 2048, "bf16", aligned=False)
    assert compiled.moved < compiled.floor
