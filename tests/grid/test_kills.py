"""Signals at any time: SIGKILL costs no more than the steps since the last checkpoint, SIGUSR1 none, no bit changes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cells import INTERRUPTED, fit, write_cell
from darlit.callbacks.run_record import RunRecord
from grid.runs_on_disk import assert_checkpoints_load, assert_events_are_monotone, comparable

STEPS = 240
RANDOM_KILLS = 13

# Runs darlit in a process that kills itself when the file of the given name is on its way to the disk: with half of it
# written, or whole but not under its name yet. Files become whole through fsync and a rename, so fsync is the place.
KILLED_WHILE_WRITING = """
import os, signal, sys
name, how, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
fsync = os.fsync
def kill_at(descriptor):
    global count
    fsync(descriptor)
    if name in os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")):
        count -= 1
        if count == 0:
            if how == "half":
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
os.fsync = kill_at
from darlit.__main__ import main
sys.exit(main(sys.argv[4:]))
"""
WRITING = [
    ("last.ckpt", "half", 1),
    ("last.ckpt", "half", 3),
    ("last.ckpt", "whole", 2),
    ("best.ckpt", "half", 2),
    ("progress.json", "half", 1),
]
AT_THE_END = [("summary.json", "half", 1), ("summary.json", "whole", 1)]


def _fit(experiment: Path, runs_dir: Path) -> list[str]:
    return ["fit", f"--config={experiment}", f"--runs_dir={runs_dir}", "--ckpt_path=last"]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to know which file is being written")
def test_twenty_kills_change_no_bit(tmp_path: Path, data_folder: Path) -> None:
    experiment = write_cell(
        tmp_path, data_folder, "dar_block",
        budget={"tokens": STEPS * 256, "batch_tokens": 256, "validation_interval": 4},
    )  # fmt: skip
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    subprocess.run([sys.executable, "-m", "darlit", *_fit(experiment, undisturbed)], check=True, capture_output=True)
    folder = killed / experiment.stem / "seed_0"
    kills, step = 0, 0

    def after_kill(code: int) -> None:
        nonlocal kills, step
        assert code == -signal.SIGKILL
        assert not (folder / "summary.json").exists()
        resumable = assert_checkpoints_load(folder)
        assert resumable >= step
        kills, step = kills + 1, resumable

    for name, how, count in WRITING:
        after_kill(_killed_while_writing(_fit(experiment, killed), name, how, count))
    dice = random.Random(0)
    for _ in range(RANDOM_KILLS):
        after_kill(_killed_after(_fit(experiment, killed), folder, seconds=dice.uniform(0.0, 0.2)))
    assert 0 < step < STEPS, "the random kills were to hit the middle of the run"
    for name, how, count in AT_THE_END:
        after_kill(_killed_while_writing(_fit(experiment, killed), name, how, count))
    assert kills == 20
    assert step == STEPS

    subprocess.run([sys.executable, "-m", "darlit", *_fit(experiment, killed)], check=True, capture_output=True)
    assert comparable(folder) == comparable(undisturbed / experiment.stem / "seed_0")
    assert json.loads((folder / "summary.json").read_text())["restarts"] > 0
    assert_events_are_monotone(folder)


def _killed_while_writing(arguments: list[str], name: str, how: str, count: int) -> int:
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, name, how, str(count), *arguments]
    return subprocess.run(command, capture_output=True, timeout=300, check=False).returncode


def _killed_after(arguments: list[str], folder: Path, seconds: float) -> int:
    """Kill the whole process group some time after this attempt has begun to train."""
    log = folder.parent / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "darlit", *arguments],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 300
        while b"\nstep " not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


@pytest.mark.slow
def test_sigusr1_at_twenty_times_saves_at_a_step_and_changes_no_bit(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"tokens": 400 * 256, "batch_tokens": 256, "validation_interval": 50}
    experiment = write_cell(tmp_path, data_folder, "dar_full", budget=budget)
    assert fit(experiment, "--runs_dir", str(tmp_path / "undisturbed")) == 0
    folder = tmp_path / "runs" / experiment.stem / "seed_0"
    dice, step, saves = random.Random(0), 0, 0
    begun = threading.Event()
    monkeypatch.setattr(RunRecord, "on_train_batch_start", lambda *arguments: begun.set())
    while saves < 20:
        begun.clear()
        sender = threading.Thread(target=_signal_after, args=(begun, dice.uniform(0.0, 0.15)), daemon=True)
        sender.start()
        assert fit(experiment, "--ckpt_path", "last") == INTERRUPTED
        sender.join()
        saved = assert_checkpoints_load(folder)
        assert saved > step
        step, saves = saved, saves + 1
    assert fit(experiment, "--ckpt_path", "last") == 0
    assert comparable(folder) == comparable(tmp_path / "undisturbed" / experiment.stem / "seed_0")
    assert_events_are_monotone(folder)


def _signal_after(begun: threading.Event, seconds: float) -> None:
    """Send SIGUSR1 to this process some time after training has begun."""
    begun.wait()
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGUSR1)
