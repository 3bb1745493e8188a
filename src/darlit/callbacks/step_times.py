"""Step times and what follows from them: tokens per second, the data loader's share, time left.

On a machine that other work shares, wall time says how busy the machine was. The CPU time of the process does not count
the waiting, and with one computing thread it is the time that the step would take alone, up to what others cost in
caches and memory bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any, Literal, NamedTuple

from darlit.errors import DarlitError
from darlit.fields import check_option

Clock = Literal["wall", "process"]
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


class StepTime(NamedTuple):
    """One optimiser step, from the end of the step before: waiting for data, computing, logging."""

    seconds: float
    """By the chosen clock."""
    wall: float
    waited: float
    """Part of the wall time in which the process waited for the data loader."""
    tokens: int


class StepTimes:
    """Collects step times; survives a restart with its totals.

    The first steps of every start build kernels, start loader workers and fill caches. They are not timed, except
    where a run has no other steps.

    Args:
        clock: ``wall`` time, or the CPU time of the ``process``, which means something for one thread only.
    """

    warmup_steps = 3
    window_steps = 50

    def __init__(self, clock: Clock = "wall") -> None:
        check_option("clock", clock, clock in CLOCKS, tuple(CLOCKS))
        self.clock = clock
        self.seconds = 0.0
        """Training seconds so far, over all restarts; a warm-up step of a restart counts as much as a mean step."""
        self.timed = StepTime(0.0, 0.0, 0.0, 0)
        """Sum over the timed steps."""
        self.untimed = StepTime(0.0, 0.0, 0.0, 0)
        """Sum over the warm-up steps."""
        self.steps = 0
        """Timed steps."""
        self.step_seconds: deque[float] = deque(maxlen=1000)
        self.recent: deque[StepTime] = deque(maxlen=self.window_steps)
        self._warmup_left = self.warmup_steps

    def add(self, step: StepTime) -> None:
        """Count one complete step."""
        if self._warmup_left:
            self._warmup_left -= 1
            self.untimed = _sum(self.untimed, step)
            self.seconds += self.timed.seconds / self.steps if self.steps else 0.0
            return
        self.timed = _sum(self.timed, step)
        self.steps += 1
        self.seconds += step.seconds
        self.step_seconds.append(step.seconds)
        self.recent.append(step)

    @property
    def tokens_per_second(self) -> float:
        """Mean over all timed steps so far, by the chosen clock."""
        counted = self._counted
        return counted.tokens / counted.seconds if counted.seconds else 0.0

    @property
    def loader_share(self) -> float:
        """Share of the wall time in which training waited for the data loader, 0 to 1."""
        counted = self._counted
        return counted.waited / counted.wall if counted.wall else 0.0

    @property
    def step_time_median(self) -> float:
        """Median seconds of the last 1,000 timed steps, 0 before the first."""
        return statistics.median(self.step_seconds) if self.step_seconds else 0.0

    @property
    def recent_tokens_per_second(self) -> float:
        """Mean over the last 50 timed steps, by the chosen clock; that of all steps where none is timed yet."""
        seconds = sum(step.seconds for step in self.recent)
        return sum(step.tokens for step in self.recent) / seconds if seconds else self.tokens_per_second

    def seconds_left(self, tokens: int) -> float | None:
        """Wall time that ``tokens`` more will take at the speed of the last steps; None before the first timed one."""
        wall, done = sum(step.wall for step in self.recent), sum(step.tokens for step in self.recent)
        return tokens * wall / done if done else None

    @property
    def _counted(self) -> StepTime:
        return self.timed if self.steps else self.untimed

    def state_dict(self) -> dict[str, Any]:
        return {
            "clock": self.clock,
            "seconds": self.seconds,
            "timed": tuple(self.timed),
            "untimed": tuple(self.untimed),
            "steps": self.steps,
            "step_seconds": list(self.step_seconds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the totals. Raises DarlitError where the run was timed by another clock until now."""
        if state["clock"] != self.clock:
            raise DarlitError(
                f"the run was timed with throughput.clock={state['clock']}, now it is {self.clock}; set it back, "
                "or start over with --overwrite true"
            )
        self.seconds, self.steps = state["seconds"], state["steps"]
        self.timed, self.untimed = StepTime(*state["timed"]), StepTime(*state["untimed"])
        self.step_seconds.extend(state["step_seconds"])


def _sum(total: StepTime, step: StepTime) -> StepTime:
    return StepTime(
        total.seconds + step.seconds, total.wall + step.wall, total.waited + step.waited, total.tokens + step.tokens
    )
