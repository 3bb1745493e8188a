"""Finished runs as they would lie on disk, with every number chosen by the test."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

SUMMARY: dict[str, Any] = {
    "schema_version": 1,
    "cell": "tiny_residual",
    "arm": "residual",
    "size": "tiny",
    "seed": 0,
    "git_revision": "0123456789abcdef0123456789abcdef01234567",
    "versions": {"torch": "2.14.1", "lightning": "2.6.6"},
    "hardware": {"device": "CPU of a test", "cores": 2, "memory_gib": 24.0, "gpus": 0},
    "budget": {
        "tokens": 2000,
        "batch_tokens": 20,
        "steps": 100,
        "sequence_length": 10,
        "val_batches": 4,
        "val_tokens": 80,
    },
    "data": {"fingerprint": "f" * 64, "tokenizer": "bytes", "vocab_size": 256, "bytes_per_token": 1.0},
    "backbone": {"layers": 4, "width": 128, "rope": {"base": 10000.0}},
    "optimizer": {"lr": 0.001, "betas": [0.9, 0.95], "schedule": {"name": "cosine", "warmup": 0.02}},
    "precision": "32-true",
    "pathway": {"name": "residual"},
    "tokens_seen": 2000,
    "val_loss_final": 2.0,
    "val_loss_best": 2.0,
    "bits_per_byte": 2.885,
    "curve": {
        "train": {"step": [50, 100], "tokens": [1000, 2000], "loss": [3.0, 2.1]},
        "val": {
            "step": [0, 25, 50, 100],
            "tokens": [0, 500, 1000, 2000],
            "loss": [5.5, 4.0, 3.0, 2.0],
            "seconds": [0.0, 5.0, 10.0, 20.0],
        },
    },
    "clock": "wall",
    "tokens_per_second": 100.0,
    "step_time_median_s": 0.2,
    "peak_memory_bytes": 1000,
    "parameters": {"total": 1000, "active": 1000, "pathway": 0},
    "flops_per_token": 6000.0,
    "wall_time_s": 21.0,
    "restarts": 0,
    "health": {"depth_entropy": 0.5},
}


def make_summary(size: str, arm: str, seed: int, /, **changes: Any) -> dict[str, Any]:
    """Return a summary; ``changes`` are dotted paths with ``__`` for the dot."""
    summary = copy.deepcopy(SUMMARY)
    summary |= {"cell": f"{size}_{arm}", "arm": arm, "size": size, "seed": seed, "pathway": {"name": arm}}
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = summary
        for parent in parents:
            node = node[parent]
        node[last] = value
    return summary


def write_cell_file(folder: Path, name: str, class_path: str = "ResidualLM", **init_args: Any) -> Path:
    """Write the experiment of a cell whose runs have summaries made here."""
    content = {
        "model": {"class_path": class_path, "init_args": init_args},
        "data": {"folder": str(folder / "not_on_this_machine"), "sequence_length": 10},  # nothing to compare with
        "budget": {"tokens": 2000, "batch_tokens": 20},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def write_run(runs_dir: Path, summary: dict[str, Any]) -> Path:
    """Write a summary where its run would have."""
    file = runs_dir / summary["cell"] / f"seed_{summary['seed']}" / "summary.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(summary))
    return file


def write_loss(runs_dir: Path, arm: str, seed: int, losses: list[float], size: str = "tiny", **changes: Any) -> Path:
    """Write a run with the given validation losses at steps 0, 25, 50 and 100."""
    summary = make_summary(
        size, arm, seed, curve__val__loss=losses, val_loss_final=losses[-1], val_loss_best=min(losses), **changes
    )
    return write_run(runs_dir, summary)
