"""What the paper (Dual Attention Residuals) claims per size and arm: shown beside our rows, never mixed with them."""

from __future__ import annotations

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
