"""Precisions of a trainer in which training goes wrong silently, by Lightning's names; torch-free."""

from __future__ import annotations

REJECTED = {
    "16-mixed": "it scales gradients before they are clipped",
    "16-true": "float16 loses small gradients and small updates",
}
"""Precisions that ``fit`` does not take, and why."""

WARNED = {
    "bf16-true": (
        "weights are kept in bfloat16, whose next value below 1 is 1 - 0.0039: gains that start at 1 do not move at "
        "all at learning rates below 0.002, and other weights lose small updates; bf16-mixed keeps float32 weights"
    )
}
"""Precisions that ``fit`` and ``plan`` warn about, and why."""
