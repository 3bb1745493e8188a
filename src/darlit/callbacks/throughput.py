"""Training speed: tokens per second and step times, validation and checkpoints not counted.

On a machine that other work shares, wall time says how busy the machine was. The process's own CPU time does not count
the waiting, and with one computing thread it is the time that the step would take alone, up to what others cost in
caches and memory bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor

from darlit.errors import DarlitError
from darlit.pathways.contract import check_option

Clock = Literal["wall", "process"]
_CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


class Throughput(pl.Callback):
    """Times every optimiser step and logs ``train/tokens_per_second``; survives a restart with its totals.

    Args:
        clock: ``wall`` time, or the CPU time of the ``process``, which means something for one thread only.
    """

    window_steps = 50

    def __init__(self, clock: Clock = "wall") -> None:
        check_option("clock", clock, clock in _CLOCKS, tuple(_CLOCKS))
        self.clock = clock
        self.seconds = 0.0
        """Training seconds so far, over all restarts."""
        self.tokens = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=self.window_steps)
        self.step_seconds: list[float] = []
        self._started: float | None = None
        self._step_seconds = 0.0
        self._step_tokens = 0

    @property
    def tokens_per_second(self) -> float:
        """Mean over all training so far."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def recent_tokens_per_second(self) -> float:
        """Mean over the last steps."""
        seconds = sum(step for step, _ in self.recent)
        return sum(tokens for _, tokens in self.recent) / seconds if seconds else 0.0

    @property
    def step_time_median(self) -> float:
        """Median seconds of an optimiser step, 0 before the first."""
        return statistics.median(self.step_seconds) if self.step_seconds else 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise DarlitError where the CPU time of this process is not the time of a step."""
        if self.clock == "wall":
            return
        threads, device, processes = torch.get_num_threads(), pl_module.device.type, trainer.world_size
        if (threads, device, processes) != (1, "cpu", 1):
            raise DarlitError(
                f"throughput.clock=process counts the CPU time of one process with one thread; here are {processes} on "
                f"{device} with {threads}: set OMP_NUM_THREADS=1 (darlit grid run: --threads 1) and one CPU device, "
                "or throughput.clock=wall"
            )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, _: int) -> None:
        self._started = _CLOCKS[self.clock]()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        if self._started is None:
            return
        self._step_seconds += _CLOCKS[self.clock]() - self._started
        self._step_tokens += batch.shape[0] * (batch.shape[1] - 1) * trainer.world_size
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.recent.append((self._step_seconds, self._step_tokens))
        self.step_seconds.append(self._step_seconds)
        self.seconds += self._step_seconds
        self.tokens += self._step_tokens
        self._step_seconds, self._step_tokens = 0.0, 0
        pl_module.log("train/tokens_per_second", self.recent_tokens_per_second, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "clock": self.clock,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "step_seconds": self.step_seconds[-1000:],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting. Raises DarlitError where the run was timed by another clock until now."""
        if state_dict["clock"] != self.clock:
            raise DarlitError(
                f"the run was timed with throughput.clock={state_dict['clock']}, now it is {self.clock}; set it back, "
                "or start over with --overwrite true"
            )
        self.seconds, self.tokens = state_dict["seconds"], state_dict["tokens"]
        self.step_seconds = list(state_dict["step_seconds"])
