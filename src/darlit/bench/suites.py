"""The suites: each returns rows ``{name, seconds, ratio, noise, ...}`` of one interleaved run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from darlit import catalog, pathways
from darlit.backbone import BackboneConfig, Transformer
from darlit.bench import peers
from darlit.bench.arms import ARMS, PathWork, Shape, build, fitting, moved_tensors, path_work
from darlit.bench.dense import Dense
from darlit.bench.measure import COPY_BYTES, DATA_SHEET_GBPS, copier, interleaved, ratio, saved_bytes
from darlit.bench.recompute import recompute
from darlit.live_tensors import PeakMemory
from darlit.ops.dispatch import choose
from darlit.pathways.fused_history import FusedHistory
from darlit.pathways.history import Blocks, Layout, PlainHistory

Rows = list[dict[str, Any]]
BASELINE = "residual"
DEPTHS = (8, 16, 32, 64)
"""Layers, where a suite measures how a cost grows."""
HOST_TOKENS, HOST_WIDTH = 16, 128


def path(shape: Shape, rounds: int) -> Rows:
    """The pathway alone, forward and backward, over its byte floor and beside the naive version and peers."""
    works: dict[str, Any] = {arm: path_work(arm, shape) for arm in fitting(shape)}
    for arm in ("attnres_full", "dar_full", "dar_block4"):
        if arm not in works:
            continue
        works[f"{arm} (reference)"] = path_work(arm, shape, "reference")
    works["dar_full (naive)"] = PathWork(Dense(build("dar_full", shape)), shape)
    for name, module in peers.installed(shape).items():
        works[name] = PathWork(module, shape)
    device = torch.device(shape.device)
    seconds = interleaved({"copy": copier(device), **works}, rounds, device, shape.clock)
    rows = path_rows(seconds, shape)
    for row in rows:
        if row["name"] == "dar_full":
            row["naive_over_this"], row["naive_noise"] = ratio(seconds["dar_full (naive)"], seconds["dar_full"])
    return rows


def path_rows(seconds: dict[str, list[float]], shape: Shape) -> Rows:
    """Rows of the pathways alone, over the floor that a ``copy`` in the same rounds sets; on a GPU that
    `DATA_SHEET_GBPS` knows, with the share of that bandwidth."""
    seconds, device = dict(seconds), torch.device(shape.device)
    copies, copied = seconds.pop("copy"), COPY_BYTES[device.type]
    data_sheet = DATA_SHEET_GBPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def speed(moved: float, times: list[float]) -> dict[str, float]:
        reached = moved / statistics.median(times) / 1e9
        return {"gigabytes_per_second": reached} | ({"data_sheet_share": reached / data_sheet} if data_sheet else {})

    rows: Rows = [{"name": "copy", "seconds": statistics.median(copies), **speed(copied, copies)}]
    if data_sheet:
        rows[0]["data_sheet_gigabytes_per_second"] = data_sheet
    for name, times in seconds.items():
        row = row_of(name, times, seconds[BASELINE])
        tensors = moved_tensors(name, shape.layers) if name in ARMS else None
        if tensors is not None:
            moved = tensors * shape.tensor_bytes
            floors = [moved / copied * copy for copy in copies]
            row["floor_seconds"] = statistics.median(floors)
            row["over_floor"], row["over_floor_noise"] = ratio(times, floors)
            row |= speed(moved, times)
        rows.append(row)
    return rows


def growth(shape: Shape, rounds: int) -> Rows:
    """Cost per branch from 8 to 64 layers: Block with four blocks, and Full for contrast."""
    rows = []
    device = torch.device(shape.device)
    small = replace(shape, tokens=max(1, shape.tokens // 4))
    for arm in ("dar_block", "attnres_block", "dar_full"):
        works: dict[str, Any] = {}
        for layers in DEPTHS:
            deep = replace(small, layers=layers)
            options: dict[str, Any] = {} if arm == "dar_full" else {"block_size": layers // 4}
            pathway = pathways.build(arm.split("_")[0], num_branches=deep.branches, width=deep.width, **options).to(
                shape.device
            )
            works[f"{arm} L={layers}"] = PathWork(pathway, deep)
        seconds = interleaved(works, rounds, device, shape.clock)
        per_branch = {name: [second / work.shape.branches for second in seconds[name]] for name, work in works.items()}
        first = per_branch[f"{arm} L=8"]
        rows += [row_of(name, times, first) for name, times in per_branch.items()]
    return rows


def host(shape: Shape, rounds: int) -> Rows:
    """What the host does for a branch, forward and backward: so few channels and tokens that nothing else counts.

    Of every arm from 8 to 64 layers: seconds a branch, relative to residual at that depth, to the arm's reference
    and to its own 8 layers.
    """
    device = torch.device(shape.device)
    rows: Rows = []
    shallow: dict[str, list[float]] = {}
    for layers in DEPTHS:
        small = replace(shape, tokens=HOST_TOKENS, width=HOST_WIDTH, layers=layers)
        works: dict[str, Any] = {}
        for name, (family, options) in catalog.arms(layers).items():
            fused = "cpu" in pathways.family(family).implementations
            for implementation in ("auto", "reference") if fused else ("auto",):
                made = pathways.build(
                    family, num_branches=small.branches, width=small.width, implementation=implementation, **options
                )
                works[name if implementation == "auto" else f"{name} (reference)"] = PathWork(made.to(device), small)
        seconds = interleaved(works, rounds, device, shape.clock)
        per_branch = {name: [second / small.branches for second in times] for name, times in seconds.items()}
        for name, times in per_branch.items():
            row = row_of(f"{name} L={layers}", times, per_branch[BASELINE])
            row["over_8_layers"], _ = ratio(times, shallow.setdefault(name, times))
            if f"{name} (reference)" in per_branch:
                row["over_reference"], _ = ratio(times, per_branch[f"{name} (reference)"])
            rows.append({**row, "branch_seconds": row["seconds"]})
    return rows


def step(shape: Shape, rounds: int) -> Rows:
    """A whole training step of the shared backbone, AdamW included; ratio is tokens/s relative to residual."""
    device = torch.device(shape.device)
    works = {arm: TrainingStep(arm, shape) for arm in fitting(shape)}
    return step_rows(interleaved(dict(works), rounds, device, shape.clock), shape.tokens)


def step_rows(seconds: dict[str, list[float]], tokens: int) -> Rows:
    """Rows of whole steps of ``tokens`` tokens each; ratio is tokens/s relative to residual."""
    rows = []
    for name, times in seconds.items():
        row = row_of(name, seconds[BASELINE], times)
        row["seconds"] = statistics.median(times)
        rows.append({**row, "tokens_per_second": tokens / row["seconds"]})
    return rows


def memory(shape: Shape, rounds: int) -> Rows:
    """Peak bytes of live tensors in a step, and what autograd keeps; counted, so one pass each is exact."""
    del rounds
    rows: Rows = []
    for arm in fitting(shape):
        work = TrainingStep(arm, shape)
        work()
        with PeakMemory(work.held) as peak:
            work()
        saved = saved_bytes(work.loss, work.held)
        rows.append({"name": arm, "peak_bytes": peak.peak, "saved_bytes": saved})
        rows[-1]["ratio"] = rows[-1]["peak_bytes"] / rows[0]["peak_bytes"]
        rows[-1]["saved_ratio"] = saved / rows[0]["saved_bytes"]
    return rows


def parts(shape: Shape, rounds: int) -> Rows:
    """What the overhead consists of: each line adds one thing to the line above it, at K = 1."""
    works = {
        "one-stream retrieval": PartWork(shape, streams=1, keys=(0,), values=(0,), gated=False),
        "+ second stream": PartWork(shape, streams=2, keys=(0, 1), values=(0, 1), gated=False),
        "+ cross-stream keys": PartWork(shape, streams=2, keys=(1, 0), values=(0, 1), gated=False),
        "+ gates and transport": PartWork(shape, streams=2, keys=(1, 0), values=(0, 1), gated=True),
    }
    device = torch.device(shape.device)
    seconds = interleaved(dict(works), rounds, device, shape.clock)
    first = seconds["one-stream retrieval"]
    rows = []
    for name, work in works.items():
        row = row_of(name, seconds[name], first)
        rows.append({**row, "saved_bytes": saved_bytes(work.forward, work.held)})
    return rows


class PartWork(PathWork):
    """A depth history of K = 1 with as many streams and as much gating as asked for."""

    def __init__(
        self, shape: Shape, *, streams: int, keys: tuple[int, ...], values: tuple[int, ...], gated: bool
    ) -> None:
        super().__init__(torch.nn.Module(), shape)
        device = torch.device(shape.device)
        self.streams, self.gated, self.keys, self.values = streams, gated, keys, values
        self.queries = torch.nn.Parameter(torch.zeros(len(keys), shape.branches, shape.width, device=device))
        self.beta = torch.nn.Parameter(torch.ones(streams, device=device), requires_grad=gated)
        self.rho = torch.nn.Parameter(torch.full((1,), 0.95, device=device), requires_grad=gated)
        for name in ("queries", "beta", "rho"):
            self.pathway.register_parameter(name, getattr(self, name))
        self.implementation = choose("auto", device.type, getattr(torch, shape.dtype))

    def forward(self) -> list[Tensor]:
        layout = Layout(self.keys, self.values, Blocks(self.shape.branches, size=2))
        streams = (self.embedding,) * self.streams
        if self.implementation == "reference":
            history: Any = PlainHistory(layout, self.queries, 1e-6)
        else:
            history = FusedHistory(layout, self.queries, 1e-6, self.implementation, streams)
        history.put(-1, streams)
        shares = torch.full((len(self.keys),), 1 / len(self.keys), device=self.embedding.device)
        reads = []
        for branch, output in enumerate(self.outputs):
            reads.append(history.read(branch, shares))
            history.write(branch, output, self.beta, self.rho if self.gated and history.carried else None)
        return [*reads, history.read(self.shape.branches, shares)]


class TrainingStep:
    """One step of the shared backbone on made-up tokens, sequences of at most 1,024."""

    def __init__(
        self, arm: str, shape: Shape, config: BackboneConfig | None = None, implementation: str = "auto"
    ) -> None:
        torch.manual_seed(0)
        length = config.sequence_length if config else min(1024, shape.tokens)
        self.config = config or BackboneConfig(
            vocab_size=257,
            num_layers=shape.layers,
            width=shape.width,
            num_heads=max(1, shape.width // 64),
            ffn_width=shape.width * 8 // 3 // 64 * 64,
            sequence_length=length,
        )
        with torch.device(shape.device):
            self.model = Transformer(self.config, build(arm, shape, implementation))
        self.autocast = shape.dtype != "float32"
        self.dtype = getattr(torch, shape.dtype)
        self.tokens = torch.randint(self.config.rows, (shape.tokens // length, length), device=shape.device)
        capturable = torch.device(shape.device).type == "cuda"  # by a CUDA graph
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, capturable=capturable)

    def loss(self) -> Tensor:
        with torch.autocast(self.tokens.device.type, dtype=self.dtype, enabled=self.autocast):
            return self.model.loss(self.tokens, self.tokens)

    def __call__(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()  # last: between steps a model keeps no gradients beside the other models

    @property
    def held(self) -> list[Tensor]:
        moments = [
            value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
        return [*self.model.parameters(), *self.model.buffers(), *moments]


def row_of(name: str, over: list[float], under: list[float]) -> dict[str, Any]:
    middle, noise = ratio(over, under)
    return {"name": name, "seconds": statistics.median(over), "ratio": middle, "noise": noise}


SUITES: dict[str, Callable[[Shape, int], Rows]] = {
    "path": path,
    "step": step,
    "growth": growth,
    "host": host,
    "memory": memory,
    "parts": parts,
    "recompute": recompute,
}
