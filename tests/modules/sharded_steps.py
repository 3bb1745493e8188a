"""What one training run did, step by step: the same few lines for one process and for each rank of several.

A program of its own when several ranks run it: ``sharded_steps.py WORLD OUT``, with LOCAL_RANK set for each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from backbone.expert_exchange import on_rank
from darlit.backbone import BackboneConfig
from darlit.modules import LanguageModule, OptimizerConfig
from darlit.modules.arms import MODULES
from darlit.modules.sharding import ShardedStrategy
from darlit.pathways.table import ARMS

STEPS, BATCH, LENGTH, VOCABULARY = 6, 8, 16, 97
CLIP = 0.3
# By the loop: grouped products take no float64.
MOE = {"num_experts": 4, "experts_per_token": 2, "ffn_width": 16, "experts": "reference"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{arm: (*ARMS[arm], {}) for arm in ("residual", "attnres_block", "mhc2", "dar_block")},
    # Its feed-forward branch does not follow from its attention branch, although both are gathered as one group.
    "dar_apart": ("dar", {"include_partial": False, "query_init_std": 0.02}, {}),
    "moe_dar_block": (*ARMS["dar_block"], MOE),
}
"""Pathway, its options, and changes of the backbone."""
RECOMPUTED = ("mhc2", "dar_apart", "moe_dar_block")
"""Cases that run with activation checkpointing too."""


class Recorder(pl.Callback):
    """Initial values, and how many this rank holds; of each step the losses and the norm of gradients; two of these."""

    def __init__(self) -> None:
        self.initial: dict[str, Tensor] = {}
        self.held = 0
        self.steps: list[dict[str, Any]] = []
        self.losses: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.initial = {name: full(parameter) for name, parameter in pl_module.named_parameters()}
        self.held = sum(local(parameter).numel() for parameter in pl_module.parameters())

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        looked_at = len(self.steps) in (0, STEPS - 1)  # gathering them one by one takes its time
        gradients = {name: full(p.grad) for name, p in pl_module.named_parameters() if looked_at and p.grad is not None}
        self.steps.append({"gradients": gradients})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(outputs["cross_entropy"])
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.steps[-1] |= {"losses": self.losses, "norm": trainer.callback_metrics["train/grad_norm"].clone()}
            self.losses = []


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def module(case: str, **changes: Any) -> LanguageModule:
    pathway, options, backbone = CASES[case]
    shape = {"vocab_size": VOCABULARY, "num_layers": 4, "width": 32, "num_heads": 2, "ffn_width": 48}
    fixed = {"sequence_length": LENGTH, "implementation": "reference"}  # which needs no compiler
    config = BackboneConfig(**{**shape, **fixed, **backbone, **changes})
    arm = next(module for module in MODULES.values() if module.pathway_name == pathway)
    return arm(pathway=options, backbone=config, optimizer=OptimizerConfig(learning_rate=1e-2))  # type: ignore[call-arg]


def batches(rank: int, world: int, parts: int) -> list[Tensor]:
    """This rank's micro-batches; one process has those of all ranks, one after the other."""
    generator = torch.Generator().manual_seed(1)
    everything = [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(parts * STEPS)]
    return everything[rank::world]


def train(
    case: str,
    rank: int,
    world: int,
    precision: str = "32-true",
    steps: int = STEPS,
    expert_parallel_size: int = 1,
    parts: int = 2,
    **changes: Any,
) -> dict[str, Any]:
    """Steps of ``parts`` micro-batches on one process, or of one on each of so many ranks.

    In float64 unless the precision is mixed, so that nothing but another computation differs by more than rounding.
    """
    pl.seed_everything(0)
    sharded = world > 1
    torch.set_default_dtype(torch.float64 if precision == "32-true" else torch.float32)
    with torch.device("meta" if sharded else "cpu"):
        model = module(case, **changes)
    recorder = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ShardedStrategy(expert_parallel_size) if sharded else "auto",
        precision=precision,  # type: ignore[arg-type]
        accumulate_grad_batches=parts // world,
        max_steps=steps,
        gradient_clip_val=CLIP,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, DataLoader(batches(rank, world, parts), batch_size=None))
    torch.set_default_dtype(torch.float32)
    final = {name: full(parameter) for name, parameter in model.named_parameters()}
    return {"held": recorder.held, "initial": recorder.initial, "steps": recorder.steps, "final": final}


def main(rank: int, world: int, out: Path) -> None:
    torch.save(on_two(rank) if world == 2 else on_four(rank), out / f"rank{rank}.pt")


def on_four(rank: int) -> dict[str, Any]:
    """Experts split over two ranks, twice."""
    return {"moe_dar_block": train("moe_dar_block", rank, 4, expert_parallel_size=2, parts=4)}


def on_two(rank: int, world: int = 2) -> dict[str, Any]:
    found = {case: train(case, rank, world) for case in CASES if case != "dar_apart"}
    found |= {f"{case} recomputed": train(case, rank, world, checkpoint_layers=True) for case in RECOMPUTED}
    found["moe_dar_block split, recomputed"] = train(
        "moe_dar_block", rank, world, expert_parallel_size=2, checkpoint_layers=True
    )
    found["dar_block bf16"] = train("dar_block", rank, world, precision="bf16-mixed", steps=1)
    found["exchange"] = on_rank(rank, torch.distributed.group.WORLD)
    return found


if __name__ == "__main__":
    import os

    main(int(os.environ["LOCAL_RANK"]), int(sys.argv[1]), Path(sys.argv[2]))
