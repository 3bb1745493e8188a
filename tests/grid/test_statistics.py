"""Statistics against hand-computed values and published quantiles."""

from __future__ import annotations

import math

import pytest

from darlit.grid.statistics import mean, paired_interval, standard_deviation, t_quantile


# Two-sided 95 % quantiles as printed in t tables.
@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (30, 2.042), (100, 1.984)],
)
def test_t_quantile_is_the_printed_one(degrees: int, quantile: float) -> None:
    assert round(t_quantile(0.95, degrees), 3) == quantile


def test_t_quantile_at_other_confidences() -> None:
    assert round(t_quantile(0.99, 4), 3) == 4.604
    assert round(t_quantile(0.90, 3), 3) == 2.353


def test_paired_interval_by_hand() -> None:
    # Differences -0.1, -0.2, -0.3: mean -0.2, sd 0.1, half width 4.302653 * 0.1 / sqrt(3) = 0.248414.
    interval = paired_interval([-0.1, -0.2, -0.3])
    assert interval is not None
    assert interval.mean == pytest.approx(-0.2)
    assert interval.low == pytest.approx(-0.448414, abs=1e-6)
    assert interval.high == pytest.approx(0.048414, abs=1e-6)


def test_a_single_value_has_no_spread_and_no_interval() -> None:
    assert standard_deviation([1.0]) is None
    assert paired_interval([1.0]) is None


def test_equal_differences_have_an_interval_of_no_width() -> None:
    interval = paired_interval([0.5, 0.5, 0.5])
    assert interval is not None
    assert (interval.low, interval.high) == (0.5, 0.5)


def test_mean_and_sample_standard_deviation() -> None:
    assert mean([1.0, 2.0, 4.0]) == pytest.approx(7 / 3)
    assert standard_deviation([1.0, 2.0, 4.0]) == pytest.approx(math.sqrt(7 / 3))
