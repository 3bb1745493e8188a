"""Step times by arithmetic: warm-up, loader's share, time left, restarts. No clock runs here."""

from __future__ import annotations

import pytest

from darlit.callbacks.meters import Meters
from darlit.callbacks.step_times import StepTime, StepTimes
from darlit.errors import DarlitError
from darlit.modules import Budget

STEP = StepTime(seconds=0.5, wall=0.5, waited=0.1, tokens=100)
BUILD = StepTime(seconds=60.0, wall=60.0, waited=0.1, tokens=100)


def times(*steps: StepTime) -> StepTimes:
    collected = StepTimes()
    for step in steps:
        collected.add(step)
    return collected


def test_the_first_steps_which_build_kernels_are_not_speed() -> None:
    collected = times(BUILD, STEP, STEP, STEP, STEP)
    assert collected.tokens_per_second == pytest.approx(200.0)
    assert collected.recent_tokens_per_second == pytest.approx(200.0)
    assert collected.seconds == pytest.approx(1.0)
    assert collected.step_time_median == pytest.approx(0.5)


def test_a_run_of_warm_up_steps_alone_still_has_a_speed() -> None:
    collected = times(STEP, STEP)
    assert collected.tokens_per_second == collected.recent_tokens_per_second == pytest.approx(200.0)
    assert collected.seconds_left(400) is None  # no speed to go by


def test_waiting_for_data_is_part_of_a_step_and_shown_apart() -> None:
    slow = StepTime(seconds=0.25, wall=0.25, waited=0.2, tokens=250)
    collected = times(*[slow] * 8)
    assert collected.tokens_per_second == pytest.approx(1000.0)
    assert collected.loader_share == pytest.approx(0.8)


def test_a_restart_warms_up_again_and_its_steps_count_as_mean_ones() -> None:
    first = times(BUILD, STEP, STEP, STEP, STEP)
    second = StepTimes()
    second.load_state_dict(first.state_dict())
    for _ in range(StepTimes.warmup_steps):
        second.add(BUILD)
    second.add(STEP)
    assert second.tokens_per_second == pytest.approx(200.0)
    assert second.seconds == pytest.approx(1.0 + 3 * 0.5 + 0.5)


def test_time_left_is_wall_time_with_the_validations_whatever_the_clock() -> None:
    meters = Meters(clock="process")
    waiting = StepTime(seconds=0.1, wall=2.0, waited=1.9, tokens=100)
    for _ in range(8):
        meters.times.add(waiting)
    assert meters.times.tokens_per_second == pytest.approx(1000.0)
    budget = Budget(tokens=2300, batch_tokens=100, validation_interval=5)
    meters.step, meters.validation_seconds = 8, 10.0
    # 15 steps of 2 s, validations at 10, 15, 20 and 23.
    assert meters.seconds_left(budget) == pytest.approx(15 * 2.0 + 4 * 10.0)
    meters.step = 23
    assert meters.seconds_left(budget) == 0.0
    assert Meters().seconds_left(budget) is None


def test_an_unknown_clock_is_refused() -> None:
    with pytest.raises(DarlitError, match="clock"):
        StepTimes(clock="sun")  # type: ignore[arg-type]
