"""A grid on a real Slurm, installed and started for these tests where that can be done."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grid import private_slurm
from grid.private_slurm import slurm
from grid.runs_on_disk import assert_events_are_monotone, comparable

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
ARMS = ("residual", "attnres_full", "dar_full", "dar_block")
PATIENCE_S = 900.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    reason = private_slurm.why_not()
    if reason is not None:
        pytest.skip(reason)
    with private_slurm.running(tmp_path_factory.mktemp("slurm")) as root:
        yield root


def _darlit(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "darlit", *arguments]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _wait(what: str, done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen in time:\n{slurm('squeue', '--array')}"
        time.sleep(0.2)


def _write_grid(folder: Path, arms: tuple[str, ...], tokens: int, name: str = "grid") -> Path:
    """Tiny cells of the repository with fewer tokens, and the grid that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for arm in arms:
        changes = {
            "base": [str(REPOSITORY / "experiments" / f"tiny_{arm}.yaml")],
            "data": {"sequence_length": 32, "batch_size": 8, "val_sequences": 32},
            "budget": {"tokens": tokens, "batch_tokens": 256, "validation_interval": 20},
        }
        (folder / f"tiny_{arm}.yaml").write_text(yaml.safe_dump(changes))
    grid = folder / f"{name}.yaml"
    grid.write_text(yaml.safe_dump({"groups": {"tiny": {"cells": [f"tiny_{arm}" for arm in arms], "seeds": [0]}}}))
    return grid


def test_disturbed_tasks_requeue_alone_and_end_as_if_nothing_had_happened(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cache is cold: the first two tasks start at once and both want the data prepared.
    monkeypatch.setenv("DARLIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    grid = _write_grid(tmp_path / "experiments", ARMS, tokens=256 * 200)
    submit = ("grid", "submit", str(grid), "--runs_dir=runs", "--gpus=0", "--cpus=1", "--throttle=2", "--time=1:00:00")
    job = _darlit(*submit, cwd=tmp_path).split(":")[0].removeprefix("job ")
    folders = {arm: tmp_path / "runs" / f"tiny_{arm}" / "seed_0" for arm in ARMS}
    assert "nothing to submit" in _darlit(*submit, cwd=tmp_path)

    disturbances = {
        "residual": ("scancel", "--signal=USR1", f"{job}_0"),
        "attnres_full": ("scancel", "--signal=TERM", f"{job}_1"),
        "dar_full": ("scontrol", "requeue", f"{job}_2"),
    }
    signalled = []
    for arm, command in disturbances.items():
        _wait(f"the middle of {arm}", (folders[arm] / "checkpoints" / "last.ckpt").exists)
        assert not (folders[arm] / "summary.json").exists()
        signalled.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    _wait("the end of all cells", lambda: all((folder / "summary.json").exists() for folder in folders.values()))
    for process in signalled:
        process.wait(timeout=300)  # scancel asks on for a while once its task has been requeued

    _darlit("grid", "run", str(grid), "--runs_dir=undisturbed", "--processes=2", cwd=tmp_path)
    for arm, folder in folders.items():
        assert comparable(folder) == comparable(tmp_path / "undisturbed" / f"tiny_{arm}" / "seed_0"), arm
        assert_events_are_monotone(folder)
        assert not list(folder.rglob("hpc_ckpt*"))
        starts = [line for line in (folder / "attempts.jsonl").read_text().splitlines() if '"start"' in line]
        restarts = json.loads((folder / "summary.json").read_text())["restarts"]
        # A scancel that asks on may signal its restarted task once more, also before it has loaded its checkpoint.
        disturbed = arm != "dar_block"
        assert (restarts >= 1) == disturbed, (arm, restarts)
        assert len(starts) > restarts if disturbed else len(starts) == 1, (arm, starts)
    visible = sorted(str(path.relative_to(tmp_path / "runs")) for path in (tmp_path / "runs").glob("[!.]*/*"))
    assert visible == sorted(f"tiny_{arm}/seed_0" for arm in ARMS)

    assert "4 done" in _darlit("grid", "status", str(grid), cwd=tmp_path)
    _darlit("results", "runs", "--out=results", cwd=tmp_path)
    with (tmp_path / "results" / "table.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert list(rows) == [*ARMS]
    assert all(row["seeds_missing"] == "" and row["throughput_ratio"] for row in rows.values())


NAMES = ["two words", "it's", "$(touch pwned)", "`touch pwned`", "a; touch pwned; b", "& touch pwned &", "50% %j", "*"]


def test_no_path_changes_what_a_script_runs(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARLIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in NAMES:
        place = tmp_path / name
        grid = _write_grid(place / f"experiments {name}", ("residual",), tokens=512)
        setup = place / f"setup {name}.sh"
        setup.write_text("echo the setup ran\n")
        _darlit(
            "grid", "submit", str(grid), f"--runs_dir={place / f'runs {name}'}", f"--setup={setup}", "--gpus=0",
            "--cpus=1", cwd=place,
        )  # fmt: skip
    for name in NAMES:
        runs = tmp_path / name / f"runs {name}"
        _wait(f"the run below {name!r}", (runs / "tiny_residual" / "seed_0" / "summary.json").exists)
        output = (runs / ".submissions" / "grid-1" / "0.out").read_text()
        assert output.startswith("the setup ran\n")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("pwned")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*NAMES, "cache"])


@pytest.mark.parametrize("name", ['say "x"', "back\\slash", "two\nlines", "#SBATCH\n#SBATCH --wrap=true", "bell\a"])
def test_a_path_that_sbatch_would_misread_is_refused(cluster: Path, tmp_path: Path, name: str) -> None:
    grid = _write_grid(tmp_path / "experiments", ("residual",), tokens=512, name="refused")
    command = [sys.executable, "-m", "darlit", "grid", "submit", str(grid), f"--runs_dir={tmp_path / name}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("darlit: error: path ")
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["experiments"]
    assert "refused" not in slurm("squeue", "--noheader", "--states=all", "--format=%j")


def test_what_sbatch_refuses_leaves_nothing_behind(cluster: Path, tmp_path: Path) -> None:
    grid = _write_grid(tmp_path / "experiments", ("residual",), tokens=512)
    command = [sys.executable, "-m", "darlit", "grid", "submit", str(grid), "--partition=nowhere", "--gpus=0"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("darlit: error: sbatch refused: ")
    assert not list(tmp_path.rglob("grid-1"))
