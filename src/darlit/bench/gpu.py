"""The suite for one GPU, in parts: the most valuable first, a time box each, nine minutes in all."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from darlit import pathways
from darlit.backbone import BackboneConfig
from darlit.bench import peers
from darlit.bench.arms import ARMS, PathWork, Shape, build
from darlit.bench.measure import Work, captured, copier, interleaved, ratio
from darlit.bench.moe7b import MOE7B, moe7b
from darlit.bench.suites import BASELINE, Rows, TrainingStep, path_rows, row_of, step_rows
from darlit.errors import DarlitError

Part = Callable[[], Iterator[dict[str, Any]]]
FUSED = tuple(arm for arm, (family, _) in ARMS.items() if "triton" in pathways.family(family).implementations)
SECONDS = 530
"""All parts together."""
MOST_ROUNDS = 5
"""Rounds of whole steps."""


@dataclass(frozen=True)
class Scale:
    """Shapes of the parts: the pathway alone, errors against float64, whole steps, whole steps of the 7B."""

    path: Shape
    error: Shape
    step: BackboneConfig
    moe7b: BackboneConfig

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.path.device).type == "cuda"


FULL = Scale(
    path=Shape(tokens=16_384, width=2048, layers=16, dtype="bfloat16", device="cuda"),
    error=Shape(tokens=257, width=768, layers=8, device="cuda"),
    step=BackboneConfig(  # dense1b
        vocab_size=32_768, num_layers=16, width=2048, num_heads=16, ffn_width=5504, sequence_length=2048
    ),
    moe7b=MOE7B,
)


def gpu(rounds: int, scale: Scale = FULL, seconds: float = SECONDS) -> Iterator[dict[str, Any]]:
    """Rows as they are measured. A part that fails or is cut leaves a row with its ``reason``, and the next begins.

    Raises:
        DarlitError: ``scale`` is for a GPU, and there is none.
    """
    if scale.on_gpu and not torch.cuda.is_available():
        raise DarlitError("suite gpu needs a GPU and torch.cuda.is_available() is False; choose path, step or memory")
    end = time.monotonic() + seconds
    for name, box, part in _parts(rounds, scale):
        yield from boxed(name, part, min(box, end - time.monotonic()))
        gc.collect()
        if scale.on_gpu:
            torch.cuda.empty_cache()


def _parts(rounds: int, scale: Scale) -> list[tuple[str, float, Part]]:
    few = min(rounds, MOST_ROUNDS)
    absent = peers.skipped(scale.path)
    return [
        ("path", 120, partial(_paths, scale.path, rounds)),
        ("step", 130, partial(_steps, scale, few)),
        ("moe7b", 120, partial(_moe7b, scale, few)),
        ("error", 40, partial(_errors, scale.error)),
        *((f"path {peer}", 30.0, partial(_peer, peer, absent.get(peer), scale.path, rounds)) for peer in peers.PEERS),
    ]


class OutOfTime(BaseException):
    """The time box of a part is over. Not an `Exception`, which compilers and autotuners catch and go on."""


def boxed(name: str, part: Part, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows of ``part`` for ``seconds``. The alarm is set only while the part runs, never while a row is written."""
    end = time.monotonic() + seconds
    try:
        rows = part()
        while True:
            with _alarm(end - time.monotonic()):
                row = next(rows, None)
            if row is None:
                return
            yield row
    except OutOfTime:
        yield {"name": name, "reason": f"cut after its {max(seconds, 0):.0f} s"}
    except Exception as error:  # a peer or a capture may fail in any way; the other parts still count
        yield {"name": name, "reason": _line(error)}


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise OutOfTime

    if seconds <= 0:
        raise OutOfTime
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def _implementation(arm: str, device: str) -> str:
    """On a GPU the kernels or an error, never the reference unnoticed."""
    return "triton" if arm in FUSED and torch.device(device).type == "cuda" else "auto"


def _paths(shape: Shape, rounds: int) -> Iterator[dict[str, Any]]:
    works: dict[str, Work] = {
        arm: PathWork(build(arm, shape, _implementation(arm, shape.device)), shape) for arm in ARMS
    }
    yield from _eager_and_graph("path", works, rounds, shape.device, lambda seconds: path_rows(seconds, shape))


def _steps(scale: Scale, rounds: int) -> Iterator[dict[str, Any]]:
    """All models at once, so that their steps are interleaved: about 65 GB of parameters and moments."""
    shape = replace(scale.path, layers=scale.step.num_layers, width=scale.step.width)
    works: dict[str, Work] = {
        arm: TrainingStep(arm, shape, scale.step, _implementation(arm, shape.device)) for arm in ARMS
    }
    yield from _eager_and_graph("step", works, rounds, shape.device, lambda seconds: step_rows(seconds, shape.tokens))


def _eager_and_graph(
    kind: str, works: dict[str, Work], rounds: int, device: str, rows: Callable[[dict[str, list[float]]], Rows]
) -> Iterator[dict[str, Any]]:
    """Every arm launched by the host, then the same replayed from a CUDA graph. An arm without a graph says why."""
    place = torch.device(device)
    copy: dict[str, Work] = {"copy": copier(place)} if kind == "path" else {}
    for row in rows(interleaved({**copy, **works}, rounds, place, "wall")):
        yield {**row, "name": f"{kind} {row['name']}"}
    graphs: dict[str, Work] = {}
    for arm, work in works.items():
        try:
            graphs[arm] = captured(work, place)
        except RuntimeError as error:
            yield {"name": f"{kind} {arm} (CUDA graph)", "reason": _line(error)}
    if BASELINE in graphs:
        for row in rows(interleaved({**copy, **graphs}, rounds, place, "wall")):
            yield {**row, "name": f"{kind} {row['name']} (CUDA graph)"}


def _moe7b(scale: Scale, rounds: int) -> Iterator[dict[str, Any]]:
    for row in moe7b(rounds, scale.moe7b, scale.path.device):
        yield {**row, "name": f"moe7b {row['name']}"}


def _errors(shape: Shape) -> Iterator[dict[str, Any]]:
    """The largest relative error, in the norm, of any read or gradient against float64 on fresh random numbers."""
    for arm in FUSED:
        for dtype in ("float32", "bfloat16"):
            yield {"name": f"error {arm} {dtype}", "error": _error(arm, replace(shape, dtype=dtype))}


def _error(arm: str, shape: Shape) -> float:
    work = PathWork(build(arm, shape, _implementation(arm, shape.device)), shape)
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
    return max(((got.double() - want).norm() / want.norm()).item() for got, want in pairs)


def _peer(name: str, absent: str | None, shape: Shape, rounds: int) -> Iterator[dict[str, Any]]:
    """A peer beside residual and the arm that computes the same, where there is one."""
    if absent is not None:
        yield {"name": f"path {name}", "reason": absent}
        return
    same = name.split()[-1]
    module = peers.PEERS[name].make(shape).to(shape.device, getattr(torch, shape.dtype))
    works: dict[str, Work] = {
        arm: PathWork(build(arm, shape, _implementation(arm, shape.device)), shape)
        for arm in (BASELINE, same)
        if arm in ARMS
    }
    seconds = interleaved({**works, name: PathWork(module, shape)}, rounds, torch.device(shape.device), "wall")
    row = row_of(f"path {name}", seconds[name], seconds[BASELINE])
    if same in works:
        row["over_ours"], _ = ratio(seconds[name], seconds[same])
    yield row
