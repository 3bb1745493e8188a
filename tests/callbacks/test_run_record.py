"""The record of a run: names, curves, and a restart that repeats nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from cells import BATCH_TOKENS, STEPS, fit, run_folder, summary, write_cell
from darlit.callbacks.meters import Meters
from darlit.callbacks.pathway_health import PathwayHealth
from darlit.callbacks.run_record import RunRecord
from darlit.modules import Budget
from darlit.run import Cell


def test_a_repeated_step_is_recorded_once() -> None:
    record = RunRecord(Cell("tiny_x"), 0, Budget(tokens=100, batch_tokens=10), Meters(), PathwayHealth())
    for step, loss in ((5, 3.0), (10, 2.0), (10, 9.0), (15, 1.0)):
        record._append(record.val_curve, step, loss=loss, seconds=1.0)
    assert record.val_curve["loss"] == [3.0, 2.0, 1.0]
    assert record.val_curve["tokens"] == [50, 100, 150]


def test_progress_is_written_while_it_runs_and_at_the_end(tmp_path: Path, data_folder: Path) -> None:
    experiment = write_cell(tmp_path, data_folder)
    assert fit(experiment) == 0
    progress = json.loads((run_folder(experiment) / "progress.json").read_text())
    assert progress["step"] == progress["max_steps"] == STEPS
    assert progress["tokens"] == STEPS * BATCH_TOKENS
    assert progress["seconds_left"] == 0
    curve = summary(run_folder(experiment))["curve"]["train"]
    assert curve["step"] == list(range(1, STEPS + 1))
    assert curve["loss"][0] > curve["loss"][-1]


def test_the_last_step_is_validated_whatever_the_interval(tmp_path: Path, data_folder: Path) -> None:
    experiment = write_cell(tmp_path, data_folder, budget__validation_interval=8)
    assert fit(experiment) == 0
    done = summary(run_folder(experiment))
    assert done["curve"]["val"]["step"] == [8, 16, STEPS]
    assert done["val_loss_final"] == done["curve"]["val"]["loss"][-1]
    assert done["tokens_seen"] == STEPS * BATCH_TOKENS
    assert torch.load(run_folder(experiment) / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == STEPS
