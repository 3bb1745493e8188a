"""Figures of the results table, as PNG and SVG whose bytes depend on the runs alone (no dates, no random ids)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darlit.grid.comparison import BASELINE, Comparison, Row
from darlit.grid.runs import ARMS, Run
from darlit.grid.statistics import mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_figures(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Draw every figure that the finished runs allow and return the PNG files, each with an SVG beside it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl

    drawings: dict[str, Callable[[Figure], None]] = {}
    for comparison in comparisons:
        if not comparison.runs:
            continue
        drawings[f"loss_curves_{comparison.size}"] = partial(_loss_curves, comparison)
        drawings[f"loss_against_speed_{comparison.size}"] = partial(_loss_against_speed, comparison)
        drawings[f"loss_against_memory_{comparison.size}"] = partial(_loss_against_memory, comparison)
    gains = _gains(comparisons)
    if any(len(points) > 1 for points in gains.values()):
        drawings["gain_against_size"] = partial(_gain_curves, gains)

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rc("svg", hashsalt="darlit")
        mpl.rc("axes", grid=True)
        mpl.rc("axes.spines", top=False, right=False)
        mpl.rc("grid", alpha=0.3)
        mpl.rc("legend", frameon=False, fontsize=8)
        return [_save(draw, folder / name) for name, draw in drawings.items()]


def _save(draw: Callable[[Figure], None], stem: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    draw(figure)
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(f"{stem}.svg", metadata={"Date": None})
    figure.savefig(f"{stem}.png", dpi=110, metadata={"Software": None})
    return Path(f"{stem}.png")


def _loss_curves(comparison: Comparison, figure: Figure) -> None:
    """Validation loss against tokens: the mean over seeds, and the band between the lowest and the highest."""
    axes = figure.subplots()
    highest = []
    for row in comparison.rows:
        if not row.seeds:
            continue
        tokens, losses = _common_points(comparison.runs[row.cell])
        centre = [mean(at) for at in losses]
        style = _line_style(row.arm)
        axes.plot(tokens, centre, label=row.arm, linewidth=1.4, **style)
        if len(row.seeds) > 1:
            low, high = [min(at) for at in losses], [max(at) for at in losses]
            axes.fill_between(tokens, low, high, alpha=0.15, linewidth=0, color=style["color"])
        highest += [loss for at, loss in zip(tokens, centre, strict=True) if at >= 0.1 * max(tokens)]
    _clip_warmup(axes, highest)
    _finish(axes, comparison.size, "training tokens", "validation loss (nats per token)")


def _loss_against_speed(comparison: Comparison, figure: Figure) -> None:
    speed = {row.cell: row.tokens_per_second for row in comparison.rows}
    _loss_against(comparison, figure, speed, "tokens per second")


def _loss_against_memory(comparison: Comparison, figure: Figure) -> None:
    mebibytes = {row.cell: row.peak_memory and row.peak_memory / 2**20 for row in comparison.rows}
    _loss_against(comparison, figure, mebibytes, "peak memory (MiB)")


def _loss_against(comparison: Comparison, figure: Figure, cost: Mapping[str, float | None], label: str) -> None:
    axes = figure.subplots()
    for row in comparison.rows:
        x = cost[row.cell]
        if x is not None and row.val_loss is not None:
            style = {"color": _line_style(row.arm)["color"], "label": row.arm}
            axes.errorbar(x, row.val_loss, yerr=row.val_loss_sd, fmt="o", capsize=3, **style)
    _finish(axes, comparison.size, label, "final validation loss (nats per token)")


def _gains(comparisons: Sequence[Comparison]) -> dict[str, list[tuple[int, float]]]:
    """By arm: (the residual model's parameters, Δ % against it) at each size that has both."""
    gains: dict[str, list[tuple[int, float]]] = {}
    for comparison in comparisons:
        baseline: Row | None = next((row for row in comparison.rows if row.arm == BASELINE and row.seeds), None)
        for row in comparison.rows:
            if baseline is not None and baseline.parameters is not None and row.delta_percent is not None:
                gains.setdefault(row.arm, []).append((baseline.parameters, row.delta_percent))
    return gains


def _gain_curves(gains: dict[str, list[tuple[int, float]]], figure: Figure) -> None:
    axes = figure.subplots()
    for arm, points in gains.items():
        sizes, deltas = zip(*sorted(points), strict=True)
        axes.plot(sizes, deltas, marker="o", label=arm, **_line_style(arm))
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    _finish(axes, "gain against model size", "parameters of the residual model", "Δ % validation loss against residual")


def _common_points(runs: Sequence[Run]) -> tuple[list[int], list[list[float]]]:
    """Evaluation points that all seeds share: their tokens, and at each the losses of all seeds."""
    curves = [run.summary["curve"]["val"] for run in runs]
    by_tokens = [dict(zip(curve["tokens"], curve["loss"], strict=True)) for curve in curves]
    common = [tokens for tokens in by_tokens[0] if all(tokens in other for other in by_tokens)]
    return common, [[curve[tokens] for curve in by_tokens] for tokens in common]


def _line_style(arm: str) -> dict[str, Any]:
    """The same colour for an arm in every figure; arms of the user's own share grey."""
    if arm == BASELINE:
        return {"color": "black", "linestyle": "--"}
    return {"color": f"C{ARMS.index(arm) % 10}" if arm in ARMS else "grey", "linestyle": "-"}


def _clip_warmup(axes: Axes, losses: list[float]) -> None:
    """Leave out the steep start, which would hide the differences at the end."""
    finite = [loss for loss in losses if loss == loss and loss != float("inf")]
    if finite and max(finite) > min(finite):
        margin = 0.05 * (max(finite) - min(finite))
        axes.set_ylim(min(finite) - margin, max(finite) + margin)


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    handles, labels = axes.get_legend_handles_labels()
    if 0 < len(labels) <= 20:
        axes.legend(handles, labels)
