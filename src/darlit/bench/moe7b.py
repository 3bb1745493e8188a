"""The 7B sparse model on one GPU: whole training steps of its arms, with each backend of experts."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from darlit import pathways
from darlit.backbone import BackboneConfig, Transformer
from darlit.bench.measure import synchronize
from darlit.catalog import arm
from darlit.errors import DarlitError

MOE7B = BackboneConfig(
    vocab_size=50304,
    num_layers=16,
    width=2048,
    num_heads=16,
    ffn_width=1024,
    num_experts=64,
    experts_per_token=8,
    sequence_length=2048,
    tie_embeddings=False,
    checkpoint_layers=True,
)
ARMS = {name: arm(name, MOE7B.num_layers) for name in ("residual", "attnres_block", "mhc2", "dar")}
SEQUENCES = 8
"""Sequences of a step: 16,384 tokens."""
WARMUP_STEPS = 2


def moe7b(rounds: int, config: BackboneConfig = MOE7B, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Yield the median step of every arm, one model after the other because two do not fit.

    The ratio is that of tokens/s to residual with the same backend. Parameters are float32, products bfloat16
    under autocast, layers recomputed, the model whole (no FSDP2).

    Raises:
        DarlitError: no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DarlitError("suite moe7b needs a GPU and torch.cuda.is_available() is False; choose path, step or memory")
    backends = ["torch"]
    if device == "cuda" and importlib.util.find_spec("megablocks"):
        backends.append("megablocks")
    for backend in backends:
        baseline: float | None = None
        for name in ARMS:
            row = _row(name, replace(config, experts=backend), device, rounds)  # type: ignore[arg-type]
            baseline = baseline or row["seconds"]
            yield {**row, "ratio": baseline / row["seconds"]}


def _row(arm: str, config: BackboneConfig, device: str, rounds: int) -> dict[str, Any]:
    model = _model(arm, config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, fused=True)
    tokens_BT = torch.randint(config.rows, (SEQUENCES, config.sequence_length + 1), device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(WARMUP_STEPS + rounds):
        synchronize(torch.device(device))
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            total = model.losses(tokens_BT[:, :-1], tokens_BT[:, 1:]).total(config)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(torch.device(device))
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[WARMUP_STEPS:])
    tokens = SEQUENCES * config.sequence_length
    row = {"name": f"{arm} {config.experts}", "seconds": seconds, "tokens_per_second": tokens / seconds}
    if device == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    del model, optimizer, total
    gc.collect()
    torch.cuda.empty_cache()
    return row


def _model(arm: str, config: BackboneConfig, device: str) -> Transformer:
    """Made on the meta device, so that its 28 GB never lie in the host's memory."""
    name, options = ARMS[arm]
    with torch.device("meta"):
        pathway = pathways.build(
            name, num_branches=config.num_branches, width=config.width, norm_eps=config.norm_eps, **options
        )
        model = Transformer(config, pathway)
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.reset_parameters()
    return model
