"""Interleaved timing: all arms of a suite in turn, round after round, so that what disturbs one disturbs all."""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Work = Callable[[], object]
COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
"""Read and written by one copy: far more than a cache holds, and on a GPU long enough that launching does not count."""
DATA_SHEET_GBPS = {"NVIDIA H200": 4800.0, "NVIDIA H100 80GB HBM3": 3350.0, "NVIDIA A100-SXM4-80GB": 2039.0}
"""Memory bandwidth by the name that PyTorch reports, from NVIDIA's data sheets; other devices: not known."""
GRAPH_WARMUP = 3
"""Runs on a side stream before a capture, as PyTorch asks."""

CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
"""``process`` counts this process's own time on one thread: what is left on a machine that others use as well."""


def interleaved(arms: dict[str, Work], rounds: int, device: torch.device, clock: str) -> dict[str, list[float]]:
    """Seconds of every arm in every round; every second round in the opposite order."""
    now = CLOCKS[clock]
    for work in arms.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms)[:: 1 if number % 2 == 0 else -1]:
            synchronize(device)
            start = now()
            arms[name]()
            synchronize(device)
            seconds[name].append(now() - start)
    return seconds


def keep_freed_memory() -> None:
    """Ask the C library to keep what is freed, for all arms alike: giving pages back and zeroing them again costs
    more than the traffic that is measured. Where there is no glibc nothing is asked."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_threshold, 32 * 2**20)
        mallopt(m_trim_threshold, 2**31 - 1)


def ratio(over: list[float], under: list[float]) -> tuple[float, float]:
    """Median of the rounds' ratios, and its noise: half the distance between their quartiles, relative."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    middle = statistics.median(ratios)
    if len(ratios) < 3:
        return middle, 0.0
    low, _, high = statistics.quantiles(ratios, n=4)
    return middle, (high - low) / 2 / middle


def copier(device: torch.device) -> Work:
    """One copy that moves the `COPY_BYTES` of its device, half read and half written."""
    source = torch.ones(COPY_BYTES[device.type] // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def captured(work: Work, device: torch.device) -> Work:
    """Replay of a CUDA graph of ``work``, which has run once before. All graphs share one pool of memory: each writes
    its scratch before it reads it, and they never run at the same time. A device without graphs runs ``work`` itself.
    """
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(GRAPH_WARMUP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_graph_pool()):
        work()
    return graph.replay


@functools.cache
def _graph_pool() -> Any:
    return torch.cuda.graph_pool_handle()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def saved_bytes(forward: Callable[[], Any], held: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps after ``forward``, each storage once; without ``held``, which exist anyway."""
    known = {tensor.untyped_storage().data_ptr() for tensor in held}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(kept.values())
    del result
    return total
