"""The suite for one GPU: every kernel against the oracle, its bandwidth, the pathways alone, and whole steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from darlit.backbone import BackboneConfig
from darlit.bench import peers
from darlit.bench.arms import ARMS, PathWork, Shape, build, moved_tensors
from darlit.bench.measure import COPY_BYTES, DATA_SHEET_GBPS, copier, interleaved, ratio
from darlit.bench.suites import TrainingStep
from darlit.errors import DarlitError

FUSED = tuple(arm for arm in ARMS if arm.startswith(("attnres", "dar")))
LAYERS = {
    "dense1b": {"num_layers": 16, "width": 2048, "num_heads": 16, "ffn_width": 5504},
    "moe7b": {"num_layers": 16, "width": 2048, "num_heads": 16, "ffn_width": 8192},
}
"""Layer shapes of the two large experiments; moe7b with a dense feed-forward as wide as its active experts."""


def gpu(rounds: int) -> list[dict[str, Any]]:
    """All of it in one run.

    Raises:
        DarlitError: no GPU.
    """
    if not torch.cuda.is_available():
        raise DarlitError("suite gpu needs a GPU and torch.cuda.is_available() is False; choose path, step or memory")
    rows = [_error(arm, dtype) for arm in FUSED for dtype in ("float32", "bfloat16")]
    rows += _paths(Shape(tokens=16_384, width=2048, layers=16, dtype="bfloat16", device="cuda"), rounds)
    for name in LAYERS:
        rows += _steps(name, rounds)
    return rows


def _error(arm: str, dtype: str) -> dict[str, Any]:
    """The largest relative error, in the norm, of any read or gradient against float64 on fresh random numbers."""
    shape = Shape(tokens=257, width=768, layers=8, dtype=dtype, device="cuda")
    work = PathWork(build(arm, shape, "triton"), shape)
    exact = PathWork(build(arm, shape, "reference").double(), shape)
    for parameter, same in zip(work.pathway.parameters(), exact.pathway.parameters(), strict=True):
        parameter.data.normal_(std=0.1)
        same.data.copy_(parameter)
    exact.embedding = work.embedding.detach().double().requires_grad_()
    exact.outputs = [output.detach().double().requires_grad_() for output in work.outputs]
    exact.gradient = work.gradient.double()

    def results(of: PathWork) -> list[Tensor]:
        reads = of.forward()
        leaves = [of.embedding, *of.outputs, *of.pathway.parameters()]
        return [*reads, *torch.autograd.grad(reads, leaves, [of.gradient] * len(reads))]

    pairs = zip(results(work), results(exact), strict=True)
    worst = max(((got.double() - want).norm() / want.norm()).item() for got, want in pairs)
    return {"name": f"{arm} {dtype} against the oracle", "error": worst}


def _paths(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    works: dict[str, Callable[[], object]] = {
        arm: PathWork(build(arm, shape, "triton" if arm in FUSED else "auto"), shape) for arm in ARMS
    }
    for name, module in peers.installed(shape).items():
        works[name] = PathWork(module.to(torch.bfloat16), shape)
    device = torch.device(shape.device)
    seconds = interleaved({"copy": copier(device), **works}, rounds, device, "wall")
    bandwidth = COPY_BYTES[device.type] / statistics.median(seconds.pop("copy"))
    data_sheet = DATA_SHEET_GBPS.get(torch.cuda.get_device_name())
    rows: list[dict[str, Any]] = [{"name": "copy", "gigabytes_per_second": bandwidth / 1e9}]
    for name, times in seconds.items():
        middle, noise = ratio(times, seconds["residual"])
        row: dict[str, Any] = {
            "name": f"path {name}",
            "seconds": statistics.median(times),
            "ratio": middle,
            "noise": noise,
        }
        tensors = moved_tensors(name, shape.layers) if name in ARMS else None
        if tensors is not None:
            moved = tensors * shape.tensor_bytes
            row["gigabytes_per_second"] = moved / row["seconds"] / 1e9
            row["copy_share"] = moved / row["seconds"] / bandwidth
            if data_sheet is not None:
                row["data_sheet_share"] = row["gigabytes_per_second"] / data_sheet
        rows.append(row)
    return rows


def _steps(name: str, rounds: int) -> list[dict[str, Any]]:
    """One arm's model at a time would not be interleaved, all at once do not fit: four layers of each are enough."""
    layers: dict[str, Any] = {**LAYERS[name], "num_layers": 4}
    shape = Shape(tokens=16_384, width=2048, layers=4, dtype="bfloat16", device="cuda")
    config = BackboneConfig(vocab_size=32_768, sequence_length=2048, **layers)
    works: dict[str, Callable[[], object]] = {
        arm: TrainingStep(arm, shape, config, "triton" if arm in FUSED else "auto") for arm in ARMS
    }
    seconds = interleaved(works, rounds, torch.device("cuda"), "wall")
    rows = []
    for arm, times in seconds.items():
        middle, noise = ratio(seconds["residual"], times)
        median = statistics.median(times)
        rows.append(
            {
                "name": f"step {name} {arm}",
                "seconds": median,
                "tokens_per_second": shape.tokens / median,
                "ratio": middle,
                "noise": noise,
            }
        )
    return rows
