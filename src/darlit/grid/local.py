"""Work a grid on this machine: N processes, each with its own threads and cores, one task after another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from darlit.grid.cells import Task
from darlit.grid.worker import Stopper, work
from darlit.run import INTERRUPTED, LockedError


@dataclass(frozen=True)
class Slot:
    """What one of N processes may use."""

    cores: tuple[int, ...]
    threads: int
    gpu: int | None

    @property
    def environment(self) -> dict[str, str]:
        variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        return variables if self.gpu is None else {**variables, "CUDA_VISIBLE_DEVICES": str(self.gpu)}


@dataclass(frozen=True)
class Outcome:
    """How one task ended; ``status`` is ``None`` where another process works it."""

    task: Task
    status: int | None
    seconds: float


def make_slots(processes: int, threads: int | None, gpus: int) -> list[Slot]:
    """Divide this machine's cores and GPUs among ``processes``; cores are pinned only where they suffice for all."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    threads = threads or max(1, (len(cores) or os.cpu_count() or 1) // processes)
    enough = processes * threads <= len(cores)
    return [
        Slot(
            cores=tuple(cores[index * threads : (index + 1) * threads]) if enough else (),
            threads=threads,
            gpu=index % gpus if gpus else None,
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
