"""Small cells for tests: an experiment file on the session's data, run through the real command line."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from darlit import catalog
from darlit.callbacks.preemption import Preemption
from darlit.catalog import Arm
from darlit.cli import main
from darlit.pathways import families
from darlit.run import INTERRUPTED as INTERRUPTED

LAYERS = 2
CLASSES = {pathway: class_path for class_path, pathway in catalog.PATHWAYS.items()}
ARMS: dict[str, Arm] = {
    **{name: catalog.arm(name, LAYERS) for name in ("residual", "attnres_full", "dar_full", "dar_block")},
    "attnres_block": Arm("attnres", {"block_size": 1}),
    "dar_dynamic": Arm("dar", {"gates": "dynamic"}),
}
STEPS = 20
BATCH_TOKENS = 256


def write_cell(folder: Path, data_folder: Path, arm: str = "dar_full", **changes: Any) -> Path:
    """Write ``<folder>/micro_<arm>.yaml`` for 20 steps with a validation every 5, and return its path."""
    name, pathway = ARMS[arm]
    backbone = {"vocab_size": 257, "num_layers": LAYERS, "width": 32, "num_heads": 2, "ffn_width": 48}
    config: dict[str, Any] = {
        "model": {
            "class_path": CLASSES[name],
            "init_args": {"backbone": backbone, "optimizer": {"learning_rate": 3e-3}},
        },
        "data": {"folder": str(data_folder), "sequence_length": 32, "batch_size": 8, "val_sequences": 16},
        "budget": {"tokens": STEPS * BATCH_TOKENS, "batch_tokens": BATCH_TOKENS, "validation_interval": 5},
        "trainer": {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 1},
        "memory_estimate": {"enabled": False},  # a second of every run
        "runs_dir": str(folder / "runs"),
    }
    default = families()[name].Options()
    if stated := {option: value for option, value in pathway.items() if value != getattr(default, option)}:
        config["model"]["init_args"]["pathway"] = stated
    for dotted, value in changes.items():
        inner = config
        *parents, last = dotted.split("__")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"micro_{arm}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run_folder(experiment: Path, seed: int = 0) -> Path:
    return experiment.parent / "runs" / experiment.stem / f"seed_{seed}"


def fit(experiment: Path, *options: str) -> int:
    """Run ``darlit fit`` in this process; returns its exit status, also when a signal ended it."""
    try:
        return main(["fit", "--config", str(experiment), *options])
    except SystemExit as exit_:
        return int(exit_.code or 0)


def interrupt_after(monkeypatch: Any, step: int) -> None:
    """Raise SIGTERM in this process during the given optimiser step of the next fit."""
    original = Preemption.on_train_batch_end

    def signalled(self: Preemption, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == step and self.received is None:
            signal.raise_signal(signal.SIGTERM)
        original(self, trainer, *arguments)

    monkeypatch.setattr(Preemption, "on_train_batch_end", signalled)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return checkpoint["state_dict"]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
