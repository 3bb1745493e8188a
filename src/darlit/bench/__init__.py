"""``darlit bench``: what the residual pathways cost, all arms and peers side by side in one run."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from darlit.arguments import Parser
from darlit.atomic import write_text
from darlit.errors import DarlitError

SUITES = ("path", "step", "growth", "host", "memory", "parts", "recompute", "gpu", "moe7b")
HIGHER_IS_BETTER = ("step", "moe7b")
"""Suites whose ratio is a speed; elsewhere it is a cost."""
MARGIN = 0.05
"""Beyond the noise of both runs, a ratio must be worse by this much to count."""


def main(arguments: list[str]) -> int:
    """Run suites, print their tables, write and compare JSON. Exit status 1: worse than the baseline."""
    options = _parse(arguments)
    baseline = _read_baseline(options.baseline)
    import torch

    from darlit.bench.arms import ARMS, Shape, fitting
    from darlit.bench.gpu import FULL, gpu
    from darlit.bench.measure import keep_freed_memory
    from darlit.bench.moe7b import moe7b
    from darlit.bench.report import table
    from darlit.bench.suites import SUITES as RUN

    keep_freed_memory()
    if options.clock == "process":
        options.threads = 1
    if options.threads:
        torch.set_num_threads(options.threads)
    shape = Shape(options.tokens, options.width, options.layers, options.dtype, options.device, options.clock)
    if options.suites == ["gpu"]:
        shape = FULL.path
    results: dict[str, Any] = {"machine": _machine(), "shape": vars(shape), "rounds": options.rounds, "suites": {}}
    for arm in sorted(set(ARMS) - set(fitting(shape))):
        print(f"{arm} is not measured: its blocks have more than --layers {shape.layers} layers")
    if "path" in options.suites:
        from darlit.bench.peers import skipped

        for peer, reason in skipped(shape).items():
            print(f"{peer} is not measured: {reason}")
    for suite in options.suites:
        measured: Iterable[dict[str, Any]]
        if suite == "gpu":
            measured = gpu(options.rounds)
        elif suite == "moe7b":
            measured = moe7b(options.rounds)
        else:
            measured = RUN[suite](shape, options.rounds)
        rows: list[dict[str, Any]] = []
        for row in measured:
            rows.append(row)
            results["suites"][suite] = rows
            if options.json:  # after every row: a run that is cut keeps what it has
                write_text(options.json, json.dumps(results, indent=1) + "\n")
        print(table(suite, rows), flush=True)
        for row in rows:
            if "reason" in row:
                print(f"{row['name']} is not measured: {row['reason']}")
    worse = [] if baseline is None else compare(baseline, results)
    for line in worse:
        print(f"worse than the baseline: {line}")
    return 1 if worse else 0


def compare(baseline: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Ratios that are worse than the baseline's by more than the noise of both runs.

    Raises:
        DarlitError: the baseline is of another shape, or lacks a suite or an arm.
    """
    if baseline["shape"] != results["shape"]:
        raise DarlitError(
            f"the baseline is of shape {baseline['shape']}, this run of {results['shape']}: give the same"
        )
    worse = []
    for suite, rows in results["suites"].items():
        known = {row["name"]: row for row in baseline["suites"].get(suite, [])}
        for row in rows:
            if row["name"] not in known:
                raise DarlitError(
                    f"the baseline has no {row['name']!r} in suite {suite}: run again with --json to renew it"
                )
            if "ratio" not in row:
                continue
            old = known[row["name"]]
            change = row["ratio"] / old["ratio"]
            change = 1 / change if suite in HIGHER_IS_BETTER else change
            allowed = 1 + MARGIN + row.get("noise", 0.0) + old.get("noise", 0.0)
            if change > allowed:
                worse.append(f"{suite} {row['name']}: {row['ratio']:.3f}, was {old['ratio']:.3f}")
    return worse


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="darlit bench", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"any of {', '.join(SUITES)}; none: path")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="step: bf16-mixed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="default: what PyTorch takes")
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "process"), help="process: own time only, implies --threads 1"
    )
    parser.add_argument("--rounds", type=int, default=9, help="every arm once a round")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--baseline", type=Path, help="fail where a ratio is worse than in this file")
    options = parser.parse_args(arguments)
    options.suites = options.suites or ["path"]
    for suite in options.suites:
        if suite not in SUITES:
            raise DarlitError(f"no suite {suite!r}; choose from {', '.join(SUITES)}")
    for name in ("tokens", "width", "layers", "rounds"):
        if getattr(options, name) < 1:
            raise DarlitError(f"--{name} {getattr(options, name)} is not allowed; it must be at least 1")
    return options


def _read_baseline(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    if not path.exists():
        raise DarlitError(f"no baseline at {path}; make one with darlit bench ... --json {path}")
    return json.loads(path.read_text(encoding="utf-8"))


def _machine() -> dict[str, Any]:
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
