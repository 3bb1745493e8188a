"""What tests ask of a real run folder."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from darlit.grid.summary import read_summary, without_timing


def comparable(folder: Path) -> dict[str, Any]:
    """The summary without what identical runs may differ in."""
    return without_timing(read_summary(folder / "summary.json"))


def assert_events_are_monotone(folder: Path) -> None:
    """TensorBoard shows every tag at rising steps, none twice, over all attempts of the run."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    assert {"train/loss", "val/loss"} <= set(tags)
    for tag in set(tags) - {"epoch"}:  # Lightning adds it to every group it logs, to training and validation alike
        steps = [event.step for event in accumulator.Scalars(tag)]
        assert all(first < second for first, second in pairwise(steps)), (tag, steps)


def assert_checkpoints_load(folder: Path) -> int:
    """Every checkpoint under its name is whole; returns the step of the last one, 0 where there is none."""
    step = 0
    for path in (folder / "checkpoints").glob("*.ckpt"):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if path.name == "last.ckpt":
            step = checkpoint["global_step"]
    return step
