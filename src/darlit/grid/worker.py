"""Run one task: run ``darlit fit`` until it ends and record how it ended.

The same code serves ``darlit grid run`` on one machine and every rank of a Slurm task. A run folder gets ``log.txt``
(what fit printed, all attempts) and ``attempts.jsonl`` (a line when an attempt starts, one when it ends). These two are
guarded by a lock of the worker; the run itself by the lock of ``fit``, which lives on when its worker is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from darlit.grid.cells import Task
from darlit.run import DONE, FAILED, INTERRUPTED, LOCKED, WORKER_LOCK, LockedError, RunFolder, hold, holder, in_slurm


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
    if folder.is_done:
        return DONE
    command = _command(task, runs_dir, options)
    variables = {**os.environ, **(environment or {})}
    if int(os.environ.get("SLURM_PROCID", 0)) > 0:  # rank 0 keeps the folder's log and record for all ranks
        return _outcome(folder, stopper, _wait(_start(command, variables), stopper))
    if not in_slurm() and (who := holder(folder)):  # such as a fit by hand, or one whose worker was killed
        raise LockedError(f"{folder.path} is written by {who}; wait for it or stop it")
    with hold(folder, WORKER_LOCK), folder.log.open("ab") as log:
        if folder.is_done:
            return DONE
        folder.note(event="start", host=socket.gethostname(), slurm_job=os.environ.get("SLURM_JOB_ID"))
        code = _wait(_start(command, variables, log), stopper)
        status = _outcome(folder, stopper, code)
        received = stopper.received.name if stopper.received else None
        folder.note(event="end", status=status, exit_code=code, signal=received)
    if status == LOCKED:
        raise LockedError(f"{folder.path} is written by {holder(folder) or 'another process'}; wait for it or stop it")
    return status


def _command(task: Task, runs_dir: Path, options: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "darlit", "fit", *task.cell.options, f"--seed_everything={task.seed}",
        f"--runs_dir={runs_dir}", "--ckpt_path=last", *options,
    ]  # fmt: skip


def _start(
    command: Sequence[str], variables: Mapping[str, str], log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start fit in its own session, so that an interrupt from the keyboard reaches it once, through the stopper."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
    )


def _wait(child: subprocess.Popen[bytes], stopper: Stopper) -> int:
    stopper.children.add(child)
    stopper.send(child)  # a signal that came before the child was known
    code = child.wait()
    stopper.children.discard(child)
    return code


def _outcome(folder: RunFolder, stopper: Stopper, code: int) -> int:
    """What an exit code (negative: killed by that signal) means for the run."""
    if folder.is_done:
        return DONE
    if code == LOCKED:
        return LOCKED
    stopped_while_loading = stopper.received is not None and code in (-signal.SIGTERM, -signal.SIGUSR1)
    return INTERRUPTED if code == INTERRUPTED or stopped_while_loading else FAILED
