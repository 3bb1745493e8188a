"""The lock of a run folder: one writer, named; stale locks are taken over; nothing is left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import SoftFileLease

import darlit
from darlit.errors import DarlitError
from darlit.run import LOCK, LOCKED, WORKER_LOCK, LockedError, RunFolder, hold, holder, lock

HOLD = (
    "import sys, time; from pathlib import Path; from darlit.run import RunFolder, hold\n"
    "with hold(RunFolder(Path(sys.argv[1]))): print('held', flush=True); time.sleep(60)"
)
ELSEWHERE = "filelock/2\npid=1\nhost=node17\nmode=lease\ntoken=0\nduration={duration!r}\nstart=1\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "cell" / "seed_0")


@contextmanager
def _other_process(folder: RunFolder) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(darlit.__file__).parents[1])},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_writer_is_told_who_the_first_is_and_touches_nothing(folder: RunFolder) -> None:
    with _other_process(folder) as first:
        before = (folder.path / LOCK).read_bytes()
        who = f"pid {first.pid} on {socket.gethostname()}"
        assert holder(folder) == who
        with pytest.raises(LockedError, match=f"is written by {who}; wait for it, stop it") as error, hold(folder):
            pass
        assert error.value.exit_status == LOCKED
        assert (folder.path / LOCK).read_bytes() == before
        assert [path.name for path in folder.path.iterdir()] == [LOCK]


def test_the_lock_of_a_killed_process_is_taken_over_at_once(folder: RunFolder) -> None:
    with _other_process(folder) as first:
        first.kill()
        first.wait()
        assert (folder.path / LOCK).exists()
        assert holder(folder) is None
        with hold(folder):
            assert holder(folder) == f"pid {os.getpid()} on {socket.gethostname()}"


def test_a_process_that_has_the_number_of_the_holder_is_not_the_holder(folder: RunFolder) -> None:
    """The number may be taken again after a restart of the machine; the start time tells the two apart."""
    with hold(folder):
        marker = (folder.path / LOCK).read_text()
    start = next(line for line in marker.splitlines() if line.startswith("start="))
    folder.path.mkdir(parents=True)
    (folder.path / LOCK).write_text(marker.replace(start, f"start={int(start.removeprefix('start=')) - 1}"))
    with hold(folder):
        assert holder(folder) is not None


def _elsewhere(folder: RunFolder, silent_s: float, duration: float) -> Path:
    """The lock of a process on another host, whose last heartbeat is some time ago."""
    folder.path.mkdir(parents=True)
    file = folder.path / LOCK
    file.write_text(ELSEWHERE.format(duration=duration))
    os.utime(file, (time.time() - silent_s,) * 2)
    return file


def test_another_host_that_sends_heartbeats_keeps_its_lock(folder: RunFolder) -> None:
    _elsewhere(folder, silent_s=lock.LEASE_S / 2, duration=lock.LEASE_S)
    assert holder(folder) == "pid 1 on node17"
    with pytest.raises(LockedError, match="pid 1 on node17"), hold(folder):
        pass


def test_another_host_that_has_fallen_silent_loses_its_lock(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 0.5)
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.1)
    _elsewhere(folder, silent_s=5.0, duration=0.5)
    assert holder(folder) is None
    with hold(folder):
        assert holder(folder) == f"pid {os.getpid()} on {socket.gethostname()}"


def test_a_file_system_without_flock_will_do(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", without)
    monkeypatch.setattr("fcntl.lockf", without)
    with hold(folder), pytest.raises(LockedError), hold(folder):
        pass


def test_a_folder_that_cannot_be_written_is_one_line(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(SoftFileLease, "acquire", refuse)
    with (
        pytest.raises(DarlitError, match=r"run\.lock: cannot be written \(Permission denied\); give a --runs_dir"),
        hold(folder),
    ):
        pass
    folder.path.parent.parent.joinpath("file").touch()
    with pytest.raises(DarlitError, match="cannot be written"), hold(RunFolder(folder.path.parents[1] / "file" / "x")):
        pass


def test_nothing_is_left_of_a_run_that_wrote_nothing(folder: RunFolder) -> None:
    with hold(folder), hold(folder, WORKER_LOCK):
        assert {path.name for path in folder.path.iterdir()} == {LOCK, WORKER_LOCK}
    assert not folder.path.parent.exists()
    with hold(folder):
        (folder.path / "kept").touch()
    assert [path.name for path in folder.path.iterdir()] == ["kept"]


def test_a_writer_that_lost_its_lock_ends_without_saving(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was stopped for longer than the lease, and another host has begun to write."""
    ended: list[int] = []
    made: list[Callable[..., None]] = []

    class Lease(SoftFileLease):
        def __init__(self, file: object, *, on_compromise: Callable[..., None], **options: object) -> None:
            made.append(on_compromise)
            super().__init__(file, on_compromise=on_compromise, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("filelock.SoftFileLease", Lease)
    monkeypatch.setattr(os, "_exit", ended.append)
    with hold(folder):
        made[0](type("Lost", (), {"reason": "owner-changed"}))
    assert ended == [LOCKED]
    assert "was lost (owner-changed); this process ends without saving" in capsys.readouterr().err
