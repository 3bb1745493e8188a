"""The record of a run: curves while it trains, ``progress.json`` now and then, ``summary.json`` when it is done."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from darlit.atomic import write_text
from darlit.backbone.sizes import parameter_counts, training_flops_per_token
from darlit.callbacks.hardware import git_revision, hardware, peak_memory_bytes, reset_peak_memory, versions
from darlit.callbacks.meters import Meters
from darlit.callbacks.pathway_health import PathwayHealth
from darlit.modules import Budget, LanguageModule
from darlit.run import SCHEMA_VERSION, Cell, RunFolder


class RunRecord(pl.Callback):
    """Writes what a finished run leaves. ``summary.json`` is the last file, whole or absent: its presence means done.

    Args:
        cell: of the grid.
        seed: of the run.
        budget: what was planned.
        meters, health: what the run is measured with.
        seconds_between_progress: how often ``progress.json`` is written.
    """

    def __init__(
        self,
        cell: Cell,
        seed: int,
        budget: Budget,
        meters: Meters,
        health: PathwayHealth,
        seconds_between_progress: float = 10.0,
    ) -> None:
        self.cell = cell
        self.seed = seed
        self.budget = budget
        self.identity: dict[str, Any] = {}
        """What the run is (`darlit.run`); set before the first step."""
        self.revisions: list[str] = []
        """Revisions of darlit that trained it, in order; ``-dirty`` marks a changed checkout."""
        self.meters = meters
        self.health = health
        self.seconds_between_progress = seconds_between_progress
        self.train_curve: dict[str, list[Any]] = {"step": [], "tokens": [], "loss": []}
        self.val_curve: dict[str, list[Any]] = {"step": [], "tokens": [], "loss": [], "seconds": []}
        self.bits_per_byte = math.nan
        self.scored = {"tokens": 0, "bytes_per_token": math.nan}
        self.restarts = 0
        self.wall_time = 0.0
        self.val_batches = 0
        self.peak_memory = 0
        self._losses: list[Any] = []
        self._started = 0.0
        self._last_progress = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        reset_peak_memory(trainer.strategy.root_device)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        revision = git_revision()  # now: the checkout may change while it trains
        if revision is not None and revision not in self.revisions:
            self.revisions.append(revision)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        tokens = self.budget.steps * self.budget.batch_tokens
        rank_zero_info(
            f"{tokens:,} training tokens, {data.passes(tokens):,.2f} passes over the corpus of {data.train_tokens:,}"
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.meters.step_complete:
            return
        self._losses.append(self.meters.losses["cross_entropy"])
        if trainer.global_step % trainer.log_every_n_steps == 0:
            finite = [loss for loss in map(float, self._losses) if math.isfinite(loss)]  # skipped steps have none
            if finite:
                self._append(self.train_curve, trainer.global_step, loss=sum(finite) / len(finite))
            self._losses = []
        if time.monotonic() - self._last_progress > self.seconds_between_progress:
            self._write_progress(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.val_batches = int(trainer.num_val_batches[0])
        self.peak_memory = max(self.peak_memory, peak_memory_bytes(pl_module.device))
        assert isinstance(pl_module, LanguageModule)
        self.scored = pl_module.scored["val"]._asdict()
        metrics, seconds = trainer.callback_metrics, self.meters.times.seconds
        self._append(self.val_curve, trainer.global_step, loss=float(metrics["val/loss"]), seconds=seconds)
        self.bits_per_byte = float(metrics["val/bits_per_byte"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_progress(trainer)
        self._write_summary(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run that was killed between its last checkpoint and its summary has nothing left to train: finish it."""
        if not self._folder(trainer).is_done:
            self._write_summary(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["identity"] = dict(self.identity)

    def state_dict(self) -> dict[str, Any]:
        return {
            "train_curve": self.train_curve,
            "val_curve": self.val_curve,
            "bits_per_byte": self.bits_per_byte,
            "revisions": self.revisions,
            "scored": self.scored,
            "restarts": self.restarts,
            "wall_time": self._wall_time(),
            "losses": [float(loss) for loss in self._losses],
            "val_batches": self.val_batches,
            "peak_memory": self.peak_memory,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.train_curve, self.val_curve = state_dict["train_curve"], state_dict["val_curve"]
        self.bits_per_byte, self.scored = state_dict["bits_per_byte"], state_dict["scored"]
        self.revisions = list(dict.fromkeys([*state_dict["revisions"], *self.revisions]))
        self.restarts = state_dict["restarts"] + 1
        self.wall_time = state_dict["wall_time"]
        self._losses = list(state_dict["losses"])
        self.val_batches = state_dict["val_batches"]
        self.peak_memory = state_dict["peak_memory"]

    def _write_summary(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step < self.budget.steps or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, LanguageModule)
        summary = self._summary(trainer, pl_module)
        write_text(self._folder(trainer).summary, json.dumps(summary, indent=1, allow_nan=False) + "\n")

    def _summary(self, trainer: pl.Trainer, module: LanguageModule) -> dict[str, Any]:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        times = self.meters.times
        return {
            "schema_version": SCHEMA_VERSION,
            "cell": self.cell.name,
            "arm": self.cell.arm,
            "size": self.cell.size,
            "seed": self.seed,
            "identity": self.identity,
            "devices": trainer.world_size,
            "git_revision": ", ".join(self.revisions) or None,
            "versions": versions(),
            "hardware": hardware(),
            "budget": {
                "tokens": self.budget.tokens,
                "batch_tokens": self.budget.batch_tokens,
                "steps": self.budget.steps,
                "sequence_length": data.sequence_length,
                "val_batches": self.val_batches,
                "val_tokens": self.scored["tokens"],
            },
            "data": {
                "fingerprint": data.fingerprint,
                "tokenizer": data.tokenizer_name,
                "vocab_size": data.vocab_size,
                "bytes_per_token": self.scored["bytes_per_token"],
                "train_tokens": data.train_tokens,
            },
            "backbone": dict(module.hparams["backbone"]),
            "optimizer": {**module.hparams["optimizer"], "gradient_clip": trainer.gradient_clip_val},
            "precision": str(trainer.precision),
            "pathway": {"name": module.pathway_name, **module.hparams["pathway"]},
            "implementation": module.transformer.pathway.implementation_for(module.transformer.embedding.weight),
            "tokens_seen": self.meters.tokens,
            "passes": data.passes(self.meters.tokens),
            "val_loss_final": self.val_curve["loss"][-1],
            "val_loss_best": min(self.val_curve["loss"]),
            "bits_per_byte": self.bits_per_byte,
            "curve": {"train": self.train_curve, "val": self.val_curve},
            "clock": times.clock,
            "tokens_per_second": times.tokens_per_second,
            "loader_share": times.loader_share,
            "step_time_median_s": times.step_time_median,
            "peak_memory_bytes": self.peak_memory,
            "parameters": parameter_counts(module.transformer)._asdict(),
            "flops_per_token": training_flops_per_token(module.transformer),
            "wall_time_s": self._wall_time(),
            "restarts": self.restarts,
            "health": self.health.latest,
        }

    def _write_progress(self, trainer: pl.Trainer) -> None:
        self._last_progress = time.monotonic()
        if not trainer.is_global_zero:
            return
        progress = {
            "step": trainer.global_step,
            "max_steps": self.budget.steps,
            "tokens": self.meters.tokens,
            "loss": self.train_curve["loss"][-1] if self.train_curve["loss"] else None,
            "tokens_per_second": self.meters.times.recent_tokens_per_second,
            "loader_share": self.meters.times.loader_share,
            "seconds_left": self.meters.seconds_left(self.budget),
            "updated": time.time(),
            "pid": os.getpid(),
        }
        write_text(self._folder(trainer).progress, json.dumps(progress) + "\n")

    def _append(self, curve: dict[str, list[Any]], step: int, **values: float) -> None:
        if curve["step"] and curve["step"][-1] >= step:
            return  # a restart repeats the validation of the step it resumes from
        for name, value in {"step": step, "tokens": step * self.budget.batch_tokens, **values}.items():
            curve[name].append(value)

    def _wall_time(self) -> float:
        return self.wall_time + (time.monotonic() - self._started if self._started else 0.0)

    def _folder(self, trainer: pl.Trainer) -> RunFolder:
        return RunFolder(Path(trainer.default_root_dir))
