"""The few statistics of the results table: mean, standard deviation, and a paired difference with its t-interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A mean difference with the bounds of its confidence interval."""

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """Return the interval in another unit, ``factor`` > 0 of which make one of this."""
        return Interval(factor * self.mean, factor * self.low, factor * self.high)


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (n - 1), or ``None`` for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return the mean of paired differences with its two-sided t-interval, or ``None`` for fewer than two pairs."""
    spread = standard_deviation(differences)
    if spread is None:
        return None
    centre = mean(differences)
    half = t_quantile(confidence, len(differences) - 1) * spread / math.sqrt(len(differences))
    return Interval(centre, centre - half, centre + half)


def t_quantile(confidence: float, degrees: int) -> float:
    """Return t with ``P(|T| < t) = confidence`` for Student's T with ``degrees`` degrees of freedom."""
    low, high = 0.0, 1.0
    while _central_probability(high, degrees) < confidence:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _central_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return high


def _central_probability(t: float, degrees: int) -> float:
    """P(|T| < t), exact for integer degrees (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
