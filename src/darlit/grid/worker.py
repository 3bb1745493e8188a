"""Work one task: hold its run folder's lock, run ``darlit fit`` until it ends, record how it ended.

The same code serves ``darlit grid run`` on one machine and every rank of a Slurm task. A run folder gets ``log.txt``
(what fit printed, all attempts) and ``attempts.jsonl`` (a line when an attempt starts, one when it ends).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from darlit.errors import DarlitError
from darlit.grid.cells import Task

DONE = 0
INTERRUPTED = 75
"""Stopped early by a signal, to be continued (EX_TEMPFAIL, as ``darlit fit`` ends)."""
FAILED = 76
"""Above INTERRUPTED: srun returns the highest status of its ranks, and one failed rank must win."""

_LOCK_PATIENCE_S = 300.0  # in a Slurm task: a dead node's lock on a network file system outlives it for a while


class LockedError(DarlitError):
    """Another process works this run folder."""


@dataclass
class Stopper:
    """Passes stop signals on to the children that are running; set up before the first child starts."""

    received: signal.Signals | None = None
    children: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def install(self) -> None:
        """Take over this process's stop signals; a hang-up that is ignored (nohup) stays ignored."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)  # what began the stop; Slurm may send more
        for child in list(self.children):
            self.send(child)

    def send(self, child: subprocess.Popen[bytes]) -> None:
        """Send the received signal to a child: SIGUSR1 as it is, all others as SIGTERM."""
        if self.received is not None and child.poll() is None:
            child.send_signal(signal.SIGUSR1 if self.received == signal.SIGUSR1 else signal.SIGTERM)


def work(
    task: Task,
    runs_dir: Path,
    stopper: Stopper,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> int:
    """Train one task to its end, or until a signal stops it.

    Args:
        task: what to train; a finished one returns at once.
        runs_dir: where run folders lie.
        stopper: receives this process's signals.
        options: further options of ``darlit fit``.
        environment: variables to set for it.

    Returns:
        DONE, INTERRUPTED or FAILED.

    Raises:
        LockedError: another process works this run folder.
    """
    folder = task.folder(runs_dir)
    if is_done(folder):
        return DONE
    command = _command(task, runs_dir, options)
    variables = {**os.environ, **(environment or {})}
    if int(os.environ.get("SLURM_PROCID", 0)) > 0:  # rank 0 keeps the folder's lock, log and record for all ranks
        return _outcome(folder, stopper, _wait(_start(command, variables), stopper))
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder) as held, (folder / "log.txt").open("ab") as log:
        if is_done(folder):
            return DONE
        _record(folder, event="start", host=socket.gethostname(), slurm_job=os.environ.get("SLURM_JOB_ID"))
        code = _wait(_start(command, variables, log, held), stopper)
        status = _outcome(folder, stopper, code)
        received = stopper.received.name if stopper.received else None
        _record(folder, event="end", status=status, exit_code=code, signal=received)
        return status


def is_done(folder: Path) -> bool:
    """Whether the run has finished: its summary is written last."""
    return (folder / "summary.json").is_file()


def is_locked(folder: Path) -> bool:
    """Whether a living process works this run folder."""
    try:
        if (folder / "run.lock").exists():
            with lock(folder, patience=0.0):
                pass
        return False
    except LockedError:
        return True


def attempts(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded starts and ends, oldest first; a line cut off by a crash is left out."""
    try:
        lines = (folder / "attempts.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _command(task: Task, runs_dir: Path, options: Sequence[str]) -> list[str]:
    budget = [f"--budget.{key}={value}" for key, value in task.cell.budget.items()]
    return [
        sys.executable, "-m", "darlit", "fit", f"--config={task.cell.file}", f"--cell={task.cell.name}",
        f"--seed_everything={task.seed}", f"--runs_dir={runs_dir}", "--ckpt_path=last", *budget, *options,
    ]  # fmt: skip


def _start(
    command: Sequence[str], variables: Mapping[str, str], log: IO[bytes] | None = None, held: IO[str] | None = None
) -> subprocess.Popen[bytes]:
    """Start fit in a session of its own, so that an interrupt from the keyboard reaches it once, through the stopper.

    It inherits the lock's file, so that the folder stays locked as long as either of us lives.
    """
    files = (held.fileno(),) if held is not None else ()
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, pass_fds=files, start_new_session=True
    )


def _wait(child: subprocess.Popen[bytes], stopper: Stopper) -> int:
    stopper.children.add(child)
    stopper.send(child)  # a signal that came before the child was known
    code = child.wait()
    stopper.children.discard(child)
    return code


def _outcome(folder: Path, stopper: Stopper, code: int) -> int:
    """What an exit code (negative: killed by that signal) means for the run."""
    if is_done(folder):
        return DONE
    stopped_while_loading = stopper.received is not None and code in (-signal.SIGTERM, -signal.SIGUSR1)
    return INTERRUPTED if code == INTERRUPTED or stopped_while_loading else FAILED


def _record(folder: Path, **values: Any) -> None:
    with (folder / "attempts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), **values}) + "\n")


@contextmanager
def lock(folder: Path, patience: float | None = None) -> Iterator[IO[str]]:
    """Hold the run folder's lock; it vanishes with the processes that hold it, however they end.

    Args:
        folder: an existing run folder.
        patience: seconds to wait for it; by default none, in a Slurm task some minutes.

    Raises:
        LockedError: another process still holds it.
    """
    if patience is None:
        patience = _LOCK_PATIENCE_S if "SLURM_JOB_ID" in os.environ else 0.0
    deadline = time.monotonic() + patience
    with (folder / "run.lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LockedError(f"{folder}: another process works this run; wait for it or stop it") from None
                time.sleep(1.0)
        yield file
