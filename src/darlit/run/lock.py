"""One lock for every writer of a run folder; it needs no flock, so that shared file systems will do."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from darlit.errors import DarlitError
from darlit.run.folder import LOCK, RunFolder
from darlit.run.status import LOCKED

LEASE_S, HEARTBEAT_S = 120.0, 20.0
"""After this time without a heartbeat the lock of another host is stale; attribute caches of NFS last 60 s."""


_PATIENCE_S = 300.0
"""In a Slurm task: the attempt before it may still be saving its last checkpoint."""


def in_slurm() -> bool:
    """Whether this process belongs to a Slurm job."""
    return "SLURM_JOB_ID" in os.environ


class LockedError(DarlitError):
    """Another process writes this run folder."""

    exit_status = LOCKED


@contextmanager
def hold(run: RunFolder, name: str = LOCK) -> Iterator[None]:
    """Hold a lock of the run folder, which is made as needed and removed where nothing was written.

    The lock is a file that names host, process and start time, made by O_EXCL: no flock, so that shared file systems
    will do. It is stale, and taken over, once its process has ended (same host) or has sent no heartbeat for LEASE_S
    (another host).

    Raises:
        LockedError: a living process holds it.
        DarlitError: the folder cannot be written.
    """
    from filelock import SoftFileLease, Timeout

    file = run.path / name
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        lease = SoftFileLease(
            file, lease_duration=LEASE_S, heartbeat_interval=HEARTBEAT_S, thread_local=False, poll_interval=0.1,
            on_compromise=lambda lost: _stop(file, lost.reason),
        )  # fmt: skip
        try:
            lease.acquire(timeout=_PATIENCE_S if in_slurm() else 0.3)  # enough to take over from one that has ended
        except Timeout:
            if holder(run, name) is not None:
                raise
            # Silent by our clock, but clocks of hosts differ: it has to stay silent while we watch.
            print(f"{file}: its holder seems to have ended; waiting up to {LEASE_S:.0f} s to be sure", file=sys.stderr)
            lease.acquire(timeout=LEASE_S + 2 * HEARTBEAT_S)
    except Timeout:
        who = holder(run, name) or "another process"
        raise LockedError(f"{run.path} is written by {who}; wait for it, stop it, or choose another --cell") from None
    except OSError as error:
        raise DarlitError(
            f"{file}: cannot be written ({error.strerror or error}); give a --runs_dir that you may write"
        ) from error
    try:
        yield
    finally:
        lease.release()
        for folder in (run.path, run.path.parent):  # rmdir spares whatever holds something
            with suppress(OSError):
                folder.rmdir()


def holder(run: RunFolder, name: str = LOCK) -> str | None:
    """Who holds a lock of the run folder, as ``pid N on HOST``, without touching it; None: no living process."""
    from filelock import SoftFileLease

    file = run.path / name
    try:
        owner = SoftFileLease(file, lease_duration=LEASE_S).owner
        silent_s = time.time() - file.stat().st_mtime
    except OSError:
        return None
    if owner is None:
        return "a process that is just starting" if silent_s < HEARTBEAT_S else None
    host, _, namespace = owner.hostname.partition("?pidns-")
    if host == socket.gethostname() and namespace in ("", _process_namespace()):
        return f"pid {owner.pid} on {host}" if _lives(owner.pid) else None
    return f"pid {owner.pid} on {host}" if silent_s < LEASE_S else None


def _process_namespace() -> str:
    try:
        return f"{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        return ""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError):  # a zombie has ended, whoever has not waited for it yet
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        return state.split()[0] != "Z"
    return True


def _stop(file: Path, reason: str) -> None:
    """End this process at once: whatever it wrote from here on would lie among the files of another one."""
    print(f"darlit: error: {file} was lost ({reason}); this process ends without saving", file=sys.stderr, flush=True)
    os._exit(LOCKED)
