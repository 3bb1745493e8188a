"""What the paper (Dual Attention Residuals) claims, beside what we measured and never mixed with it."""

from __future__ import annotations

from dataclasses import dataclass

_DENSE_GAIN = "DAR variants: −2.03 % to −5.12 % loss against residual"
_BEATEN = "DAR has the lower loss"

_CLAIMS = {
    **{
        (size, arm): _DENSE_GAIN
        for size in ("dense0.1b", "dense0.3b", "dense0.5b")
        for arm in ("dar_full", "dar_block")
    },
    ("dense1b", "dar_full"): "lowest loss of its size",
    ("dense1b", "dar_block"): "below residual and AttnRes-Block",
    ("moe7b", "dar"): "lowest loss, curve below the baselines throughout, throughput −17.5 %",
    **{
        ("dense0.3b", arm): f"routing ablation: {_BEATEN}"
        for arm in ("dar_self_kv", "dar_cross_v", "dar_fixed_kv", "attnres_sep_v")
    },
}


def paper_claim(size: str, arm: str) -> str | None:
    """Return the paper's claim about an arm at a size, or ``None`` where it makes none."""
    return _CLAIMS.get((size, arm))


@dataclass(frozen=True)
class OrderClaim:
    """Of two arms ``lower`` has the lower validation loss. ``source`` is the paper's scale, or who else asks."""

    lower: str
    higher: str
    claim: str
    source: str


_BASELINES = ("residual", "transparent", "denseformer", "attnres_full", "hc2", "mhc2", "mhc4")
_ROUTES = ("dar_self_kv", "dar_cross_v", "dar_fixed_kv", "attnres_sep_v")
ORDER_CLAIMS = (
    *(
        OrderClaim("dar_full", arm, "DAR has the lowest loss", "the paper, 0.1 B to 1 B and a 7 B MoE")
        for arm in _BASELINES
    ),
    OrderClaim("dar_block", "residual", "DAR-Block is below residual", "the paper, 1 B"),
    OrderClaim("dar_block", "attnres_block", "DAR-Block is below AttnRes-Block", "the paper, 1 B"),
    *(OrderClaim("dar_full", arm, "routing ablation: DAR is below", "the paper") for arm in _ROUTES),
    OrderClaim("dar_full", "attnres_2q", "two streams bring more than two queries", "our control, not the paper's"),
)
"""What the paper says of two arms, whatever the size: a smaller size than the paper's may hold it against itself."""
