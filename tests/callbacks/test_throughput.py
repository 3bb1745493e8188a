"""The two clocks of a run's step times, and what they refuse. A sleep stands for waiting on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cells import BATCH_TOKENS, STEPS, fit, interrupt_after, run_folder, summary, write_cell
from darlit.callbacks.throughput import Throughput
from darlit.errors import DarlitError
from darlit.grid.summary import read_summary
from darlit.modules import LanguageModule


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("clock", ["wall", "process"])
@pytest.mark.usefixtures("one_thread")
def test_waiting_counts_in_wall_time_alone(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    original = LanguageModule.training_step

    def waiting(self: LanguageModule, *arguments: object) -> object:
        time.sleep(0.5)
        return original(self, *arguments)

    monkeypatch.setattr(LanguageModule, "training_step", waiting)
    experiment = write_cell(tmp_path, data_folder, budget__tokens=4 * BATCH_TOKENS, budget__validation_interval=2)
    assert fit(experiment, f"--throughput.clock={clock}") == 0
    record = read_summary(run_folder(experiment) / "summary.json")
    seconds = record["curve"]["val"]["seconds"]
    assert record["clock"] == clock
    assert len(seconds) == 2
    assert 0 < seconds[0] < seconds[1]
    assert record["tokens_per_second"] == pytest.approx(4 * BATCH_TOKENS / seconds[1])
    # Sleeping takes 2 s of wall time, whatever else runs on the machine, and next to none of CPU time.
    assert (seconds[1] >= 2.0) == (clock == "wall")


def test_process_time_is_refused_with_more_threads(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    experiment = write_cell(tmp_path, data_folder, throughput__clock="process")
    with pytest.raises(
        DarlitError, match=r"clock=process .* one thread; here are 1 on cpu with 2: set OMP_NUM_THREADS=1"
    ):
        fit(experiment)
    assert not (run_folder(experiment) / "summary.json").exists()


def test_an_unknown_clock_is_refused() -> None:
    with pytest.raises(ValueError, match="clock"):
        Throughput(clock="sun")  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_thread")
def test_a_run_keeps_its_clock(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = write_cell(tmp_path, data_folder, throughput__clock="process")
    with monkeypatch.context() as patch:
        interrupt_after(patch, step=7)
        assert fit(experiment) == 75
    with pytest.raises(DarlitError, match="timed with throughput.clock=process, now it is wall"):
        fit(experiment, "--ckpt_path=last", "--throughput.clock=wall")
    assert fit(experiment, "--ckpt_path=last") == 0
    assert summary(run_folder(experiment))["tokens_seen"] == STEPS * BATCH_TOKENS
