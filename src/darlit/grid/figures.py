"""Figures of the results table, as PNG and SVG whose bytes depend on the runs alone (no dates, no random ids)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darlit.atomic import partial_file
from darlit.catalog import ARMS
from darlit.grid.comparison import BASELINE, Comparison, Row
from darlit.grid.runs import Run
from darlit.grid.statistics import mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_figures(comparisons: Sequence[Comparison], folder: Path, svg: bool = False) -> list[Path]:
    """Draw every figure that the finished runs allow and return the PNG files, with ``svg`` each with an SVG beside it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl

    drawings: dict[str, Callable[[Figure], None]] = {
        f"size_{comparison.size}": partial(_draw_size, comparison) for comparison in comparisons if comparison.runs
    }
    gains = _gains(comparisons)
    if any(len(points) > 1 for points in gains.values()):
        drawings["gain_against_size"] = partial(_draw_gains, gains)

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rc("svg", hashsalt="darlit", fonttype="none")
        mpl.rc("font", family="DejaVu Sans")
        mpl.rc("axes", grid=True, titley=1.0)
        mpl.rc("axes.spines", top=False, right=False)
        mpl.rc("grid", alpha=0.3)
        mpl.rc("legend", frameon=False, fontsize=8)
        return [_save(draw, folder / name, svg) for name, draw in drawings.items()]


def _save(draw: Callable[[Figure], None], stem: Path, svg: bool) -> Path:
    from matplotlib.figure import Figure

    figure = Figure()
    draw(figure)
    picture = Path(f"{stem}.png")
    if svg:
        with partial_file(Path(f"{stem}.svg")) as partial:
            figure.savefig(partial, format="svg", metadata={"Date": None})
    with partial_file(picture) as partial:
        figure.savefig(partial, format="png", dpi=110, metadata={"Software": None})
    return picture


def _draw_size(comparison: Comparison, figure: Figure) -> None:
    """Four panels: loss curves, gain against residual, final loss against speed, final loss against memory."""
    figure.set_size_inches(12, 8.6)
    (curves, gain), (speed, memory) = figure.subplots(2, 2)
    rows = [row for row in comparison.rows if row.seeds]
    _draw_curves(comparison, rows, curves)
    draw_deltas(rows, gain)
    for row in rows:
        _draw_point(row, row.tokens_per_second, speed)
        _draw_point(row, row.peak_memory and row.peak_memory / 2**20, memory)
    curves.set(title=comparison.size, xlabel="training tokens", ylabel="validation loss (nats per token)")
    gain.set(title="against residual, same seeds", xlabel="Δ % validation loss, 95 % interval")
    speed.set(title="loss against speed", xlabel="tokens per second", ylabel="validation loss")
    memory.set(title="loss against memory", xlabel="peak memory (MiB)")
    figure.subplots_adjust(left=0.07, right=0.84, bottom=0.07, top=0.95, wspace=0.3, hspace=0.3)
    figure.legend(*_first_entries(curves), loc="center left", bbox_to_anchor=(0.85, 0.5))


def draw_deltas(rows: Sequence[Row], axes: Axes) -> None:
    """Draw Δ % of each arm against residual, in table order from the top, with its interval, which one seed has not."""
    deltas = [(row, row.delta_percent) for row in rows if row.delta_percent is not None]
    for place, (row, delta) in enumerate(deltas):
        style = _line_style(row.arm)
        if row.delta_percent_interval is not None:
            bounds = [row.delta_percent_interval.low, row.delta_percent_interval.high]
            axes.plot(bounds, [place, place], color=style["color"])
        axes.plot([delta], [place], color=style["color"], marker=style["marker"])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(deltas)), labels=[row.arm for row, _ in deltas], fontsize=8)
    axes.set_ylim(max(1, len(deltas)) - 0.5, -0.5)


def _draw_curves(comparison: Comparison, rows: Sequence[Row], axes: Axes) -> None:
    """Validation loss against tokens: the mean over seeds, and the band between the lowest and the highest."""
    after_warmup: list[float] = []
    for row in rows:
        tokens, losses = _common_points(comparison.runs[row.cell])
        centre = [mean(at) for at in losses]
        style = _line_style(row.arm)
        # No marker on the curve, only in the legend, which serves the panels of points too.
        axes.plot(tokens, centre, label=row.arm, linewidth=1.4, markevery=slice(0), **style)
        if len(row.seeds) > 1:
            low, high = [min(at) for at in losses], [max(at) for at in losses]
            axes.fill_between(tokens, low, high, alpha=0.15, linewidth=0, color=style["color"])
        after_warmup += [loss for at, loss in zip(tokens, centre, strict=True) if at >= 0.1 * max(tokens)]
    _clip_start(axes, after_warmup)


def _draw_point(row: Row, x: float | None, axes: Axes) -> None:
    """The mean final loss, with a bar of one standard deviation to each side."""
    if x is None or row.val_loss is None:
        return
    style = _line_style(row.arm)
    spread = row.val_loss_sd or 0.0
    axes.plot([x, x], [row.val_loss - spread, row.val_loss + spread], color=style["color"])
    axes.plot([x], [row.val_loss], color=style["color"], marker=style["marker"])


def _gains(comparisons: Sequence[Comparison]) -> dict[str, list[tuple[int, float]]]:
    """By arm: (the residual model's parameters, Δ % against it) at each size that has both."""
    gains: dict[str, list[tuple[int, float]]] = {}
    for comparison in comparisons:
        baseline: Row | None = next((row for row in comparison.rows if row.arm == BASELINE and row.seeds), None)
        for row in comparison.rows:
            if baseline is not None and baseline.parameters is not None and row.delta_percent is not None:
                gains.setdefault(row.arm, []).append((baseline.parameters, row.delta_percent))
    return gains


def _draw_gains(gains: dict[str, list[tuple[int, float]]], figure: Figure) -> None:
    figure.set_size_inches(8, 4.4)
    axes = figure.subplots()
    for arm, points in gains.items():
        sizes, deltas = zip(*sorted(points), strict=True)
        axes.plot(sizes, deltas, label=arm, **_line_style(arm))
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.minorticks_off()
    parameters = sorted({size for points in gains.values() for size, _ in points})
    axes.set_xticks(parameters, labels=[f"{size / 1e6:,.3g} M" for size in parameters], rotation=30, fontsize=8)
    axes.set(
        title="gain against model size",
        xlabel="parameters of the residual model",
        ylabel="Δ % validation loss against residual",
    )
    figure.subplots_adjust(left=0.1, right=0.77, bottom=0.18, top=0.91)
    figure.legend(*_first_entries(axes), loc="center left", bbox_to_anchor=(0.78, 0.5))


def _common_points(runs: Sequence[Run]) -> tuple[list[int], list[list[float]]]:
    """Evaluation points that all seeds share: their tokens, and at each the losses of all seeds."""
    curves = [run.summary["curve"]["val"] for run in runs]
    by_tokens = [dict(zip(curve["tokens"], curve["loss"], strict=True)) for curve in curves]
    common = [tokens for tokens in by_tokens[0] if all(tokens in other for other in by_tokens)]
    return common, [[curve[tokens] for curve in by_tokens] for tokens in common]


def _line_style(arm: str) -> dict[str, Any]:
    """The same look for an arm in every figure; arms of the user's own share grey."""
    if arm == BASELINE:
        return {"color": "black", "linestyle": "--", "marker": "x"}
    if arm not in ARMS:
        return {"color": "grey", "linestyle": "-", "marker": "o"}
    cycle, colour = divmod(list(ARMS).index(arm) - 1, 10)
    return {"color": f"C{colour}", "linestyle": ("-", "-.")[cycle], "marker": ("o", "^")[cycle]}


def _clip_start(axes: Axes, losses: list[float]) -> None:
    """Leave out the steep start, which would hide the differences at the end."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite and max(finite) > min(finite):
        margin = 0.05 * (max(finite) - min(finite))
        axes.set_ylim(min(finite) - margin, max(finite) + margin)


def _first_entries(axes: Axes, limit: int = 24) -> tuple[list[Any], list[str]]:
    """The legend's handles and labels, no more than fit the height of a figure."""
    handles, labels = axes.get_legend_handles_labels()
    return handles[:limit], labels[:limit]
