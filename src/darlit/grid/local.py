"""Work a grid on this machine: N processes, each with its own threads and cores, one task after another."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from queue import Empty, SimpleQueue

from darlit.errors import DarlitError
from darlit.grid.cells import Task
from darlit.grid.worker import Stopper, work
from darlit.run import INTERRUPTED, LockedError

_GPU_NAME = re.compile(r"\d+$|(GPU|MIG)-")


@dataclass(frozen=True)
class Slot:
    """What one of N processes may use."""

    cores: tuple[int, ...]
    threads: int
    gpu: str | None
    """As ``CUDA_VISIBLE_DEVICES`` names it: a number, a UUID or a MIG instance."""

    @property
    def environment(self) -> dict[str, str]:
        variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        return variables if self.gpu is None else {**variables, "CUDA_VISIBLE_DEVICES": self.gpu}


@dataclass(frozen=True)
class Outcome:
    """How one task ended; ``status`` is ``None`` where another process works it."""

    task: Task
    status: int | None
    seconds: float


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, in the order of ``CUDA_VISIBLE_DEVICES``; without it, 0 to N - 1."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        import torch

        return [str(index) for index in range(torch.cuda.device_count())]
    names = (name.strip() for name in listed.split(","))
    return list(takewhile(_GPU_NAME.match, names))  # CUDA too ignores everything after the first invalid name


def make_slots(processes: int, threads: int | None, gpus: int) -> list[Slot]:
    """Divide this machine's cores and the first ``gpus`` visible GPUs among ``processes``.

    Cores are pinned only where there are enough for all processes.

    Raises:
        DarlitError: more GPUs than are visible.
    """
    visible = visible_gpus() if gpus else []
    if not 0 <= gpus <= len(visible):
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "this machine" if listed is None else f"CUDA_VISIBLE_DEVICES={listed!r}"
        raise DarlitError(f"--gpus {gpus} is not allowed: {where} has {len(visible)}; give 0 (CPU) to {len(visible)}")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    threads = threads or max(1, (len(cores) or os.cpu_count() or 1) // processes)
    enough = processes * threads <= len(cores)
    return [
        Slot(
            cores=tuple(cores[index * threads : (index + 1) * threads]) if enough else (),
            threads=threads,
            gpu=visible[index % gpus] if gpus else None,
        )
        for index in range(processes)
    ]


def run_tasks(
    tasks: Iterable[Task],
    runs_dir: Path,
    slots: Sequence[Slot],
    options: Sequence[str],
    report: Callable[[Outcome], None],
) -> list[Outcome]:
    """Work all tasks; a failed one does not stop the others, a stop signal leaves the rest for the next time."""
    waiting: SimpleQueue[Task] = SimpleQueue()
    for task in tasks:
        waiting.put(task)
    stopper = Stopper()
    stopper.install()

    def work_through(slot: Slot) -> list[Outcome]:
        if slot.cores:
            os.sched_setaffinity(0, slot.cores)  # of this thread; the processes it starts inherit it
        outcomes = []
        for task in _until_stopped(waiting, stopper):
            started = time.monotonic()
            try:
                status: int | None = work(task, runs_dir, stopper, options, slot.environment)
            except LockedError:
                status = None
            outcomes.append(Outcome(task, status, time.monotonic() - started))
            report(outcomes[-1])
        return outcomes

    with ThreadPoolExecutor(len(slots)) as pool:
        finished = [outcome for outcomes in pool.map(work_through, slots) for outcome in outcomes]
    left = [Outcome(task, INTERRUPTED, 0.0) for task in _drain(waiting)]
    return sorted([*finished, *left], key=lambda outcome: outcome.task.index)


def _until_stopped(waiting: SimpleQueue[Task], stopper: Stopper) -> Iterator[Task]:
    while stopper.received is None:
        try:
            yield waiting.get_nowait()
        except Empty:
            return


def _drain(waiting: SimpleQueue[Task]) -> Iterator[Task]:
    while not waiting.empty():
        yield waiting.get_nowait()
