"""Pictures of CKA maps, rescue gains, depth weights and gates: any number of models side by side on one scale.

Every function takes what it draws by the name of the model and returns a figure; nothing here has global state, so a
picture can be made in the middle of training. Bytes depend on the numbers alone (no dates, no random ids).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from darlit.atomic import partial_file
from darlit.pathways.contract import BRANCHES_PER_LAYER
from darlit.probes.cka import CkaMap
from darlit.probes.depth import DepthProfile, Gate
from darlit.probes.rescue import RescueCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
"""Most panels of one row, where each model has one panel."""
BRANCH_STYLES = {"attention": "o-", "feed-forward": "s--"}
LINES = 4
"""A gate with more components than this, and every matrix, is drawn as a heat map, one column a component."""
ANNOTATED = 7
"""Maps of up to so many depths show their values as numbers."""
ABSENT = "0.9"
"""Grey of a place that holds no number."""


def save(draw: Callable[[], Figure], stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw and write ``<stem>.<kind>``, the same bytes every time; returns the files in the order of ``kinds``."""
    written = [Path(f"{stem}.{kind}") for kind in kinds]
    with _style():
        figure = draw()
        for file, kind in zip(written, kinds, strict=True):
            metadata = {"svg": {"Date": None}, "png": {"Software": None}}[kind]
            with partial_file(file) as partial:
                figure.savefig(partial, dpi=110, format=kind, metadata=metadata)
    return written


def as_image(draw: Callable[[], Figure], dpi: int = 90) -> NDArray[np.uint8]:
    """Draw and return the pixels ``[height, width, 3]``, 8 bits each."""
    with _style():
        figure = draw()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="rgba", dpi=dpi)
    width, height = (round(inches * dpi) for inches in figure.get_size_inches())
    pixels = np.frombuffer(buffer.getvalue(), dtype=np.uint8)
    return pixels.reshape(height, width, 4)[:, :, :3]


def draw_cka(maps: Mapping[str, CkaMap]) -> Figure:
    """One heat map a model: depth of the first stream against depth of the second, colours from 0 to 1."""
    figure, grid = _panels(len(maps), size=(2.9, 3.0))
    for axes, (name, cka) in zip(grid, maps.items(), strict=True):
        values_RR = cka.values_RR.numpy()
        image = axes.imshow(values_RR, vmin=0, vmax=1, cmap=_colours("viridis"), origin="lower")
        first, second = cka.streams
        axes.set(
            title=f"{name}\noff the diagonal {cka.mean_off_diagonal:.2f}",
            xlabel=f"depth of stream {second}",
            ylabel=f"depth of stream {first}",
        )
        _integer_ticks(axes.xaxis, len(values_RR))
        _integer_ticks(axes.yaxis, len(values_RR))
        if len(values_RR) <= ANNOTATED:
            _write_values(axes, values_RR, bright_below=0.6)
    figure.colorbar(image, ax=grid, label="linear CKA", shrink=0.8)
    return figure


def draw_rescue(curves: Mapping[str, Sequence[RescueCurve]]) -> Figure:
    """One panel a model: gain of each kept stream and the balance, by depth; a line style for each corruption."""
    figure, grid = _panels(len(curves), size=(3.2, 2.9), share_y=True)
    styles = ("-", "--", ":")
    for axes, (name, of_model) in zip(grid, curves.items(), strict=True):
        for curve, style in zip(of_model, styles, strict=False):
            suffix = f" ({curve.corruption})" if len(of_model) > 1 else ""
            for stream, gains in enumerate(curve.gains):
                label = f"keep stream {stream}{suffix}"
                axes.plot(curve.depths, gains, marker="o", markersize=3, color=f"C{stream}", ls=style, label=label)
            axes.plot(curve.depths, curve.balance, color="0.45", linewidth=1, ls=style, label=f"balance{suffix}")
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set(title=name, xlabel=f"depth {of_model[0].span.replace('_', ' ')} which states are corrupted")
        axes.set_ylabel("rescue gain")
        axes.set_xticks(of_model[0].depths[:: math.ceil(len(of_model[0].depths) / 9)])
    _one_legend(figure, grid)
    return figure


def draw_depth_weights(profiles: Mapping[str, DepthProfile]) -> Figure:
    """A row a model: a heat map read x source for each query, and the entropies."""
    profiles = {name: profile for name, profile in profiles.items() if profile.reads}
    targets = 1 + max(read.target for profile in profiles.values() for read in profile.reads)
    most_sources = max(len(read.weights) for profile in profiles.values() for read in profile.reads)
    figure = _figure((3.0 * (targets + 1) + 0.8, 2.9 * len(profiles)))
    grid = figure.subplots(len(profiles), targets + 1, squeeze=False)
    for row, (name, profile) in zip(grid, profiles.items(), strict=True):
        of_targets = {
            target: {read.read: read.weights for read in profile.reads if read.target == target}
            for target in sorted({read.target for read in profile.reads})
        }
        for axes in row[len(of_targets) : targets]:
            axes.set_axis_off()
        for axes, (target, weights) in zip(row, of_targets.items(), strict=False):
            image = _ragged_image(axes, weights, profile.num_branches + 1, vmin=0, vmax=1, cmap=_colours("viridis"))
            suffix = f"\nquery {target}" if len(of_targets) > 1 else ""
            axes.set(title=name + suffix, xlabel="source (0 = embedding)")
        _draw_entropy(row[targets], profile)
        row[targets].set(title=f"{name}\nentropy", ylim=(0, 1.05 * math.log(most_sources)))
    figure.colorbar(image, ax=list(grid.flat), label="mean depth weight", shrink=min(1, 1.5 / len(profiles)))
    return figure


def draw_gates(profiles: Mapping[str, DepthProfile]) -> Figure:
    """A row a model, a panel a gate: lines over the layers, or a heat map of a gate with many components."""
    gates = {name: _gates_by_name(profile) for name, profile in profiles.items() if profile.gates}
    columns = max(len(by_name) for by_name in gates.values())
    figure = _figure((3.3 * columns + 1.6, 2.7 * len(gates)))
    grid = figure.subplots(len(gates), columns, squeeze=False)
    limits = _limits(gates)
    for row, (name, by_name) in zip(grid, gates.items(), strict=True):
        for axes in row[len(by_name) :]:
            axes.set_axis_off()
        for axes, (gate_name, of_branches) in zip(row, by_name.items(), strict=False):
            _draw_gate(figure, axes, of_branches, profiles[name].num_branches, limits[gate_name])
            axes.set_title(f"{name}: {gate_name}")
    _one_legend(figure, list(grid.flat))
    return figure


def _draw_entropy(axes: Axes, profile: DepthProfile) -> None:
    for target in sorted({read.target for read in profile.reads}):
        reads = [read for read in profile.reads if read.target == target]
        places = [read.read for read in reads]
        axes.plot(places, [read.entropy for read in reads], "o-", markersize=3, label=f"query {target}")
    axes.plot(places, [math.log(len(read.weights)) for read in reads], color="0.45", ls="--", label="ln S: all alike")
    axes.set_ylabel("entropy (nats)")
    axes.legend(loc="lower right")
    _branch_ticks(axes, axes.xaxis, profile.num_branches, end=True)


def _draw_gate(
    figure: Figure, axes: Axes, gates: Sequence[Gate], num_branches: int, limits: tuple[float, float]
) -> None:
    low, high = limits
    if _many_components(gates):
        rows = {gate.branch: gate.values for gate in gates}
        image = _ragged_image(axes, rows, num_branches, vmin=low, vmax=high, cmap=_colours("RdBu_r"))
        longest = max(gates, key=lambda gate: len(gate.labels)).labels
        axes.set_xticks(range(len(longest)), longest, rotation=90 if len(longest) > 9 else 0)
        axes.set_xlabel("component")
        figure.colorbar(image, ax=axes, label="mean value")
        return
    for offset, (kind, style) in enumerate(BRANCH_STYLES.items()):
        of_kind = [gate for gate in gates if gate.branch % BRANCHES_PER_LAYER == offset]
        places = [gate.branch for gate in of_kind]
        for component in range(len(gates[0].labels) if of_kind else 0):
            values = [gate.values[component] for gate in of_kind]
            label = f"component {component}, {kind}"
            axes.plot(places, values, style, markersize=3, color=f"C{component}", label=label)
    margin = 0.04 * (high - low)
    axes.set(ylabel="mean value", ylim=(low - margin, high + margin))
    _branch_ticks(axes, axes.xaxis, num_branches, end=True)


def _gates_by_name(profile: DepthProfile) -> dict[str, list[Gate]]:
    by_name: dict[str, list[Gate]] = {}
    for gate in profile.gates:
        by_name.setdefault(gate.name, []).append(gate)
    return by_name


def _limits(gates: Mapping[str, dict[str, list[Gate]]]) -> dict[str, tuple[float, float]]:
    """One range a gate's name over all models: 0 to 1 or more; symmetric for heat maps, so that white is 0."""
    limits: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys(name for by_name in gates.values() for name in by_name):
        of_name = [gate for by_name in gates.values() for gate in by_name.get(name, [])]
        values = [value for gate in of_name for value in gate.values]
        largest = max(map(abs, values))
        limits[name] = (-largest, largest) if _many_components(of_name) else (min(0, *values), max(1, *values))
    return limits


def _many_components(gates: Sequence[Gate]) -> bool:
    sizes = {len(gate.values) for gate in gates}
    return len(sizes) > 1 or max(sizes) > LINES or "," in gates[0].labels[0]


def _ragged_image(axes: Axes, rows: Mapping[int, Sequence[float]], height: int, **options: Any) -> Any:
    """A heat map of ``height`` rows, one a branch, from the top down; places without a value stay grey."""
    width = max(map(len, rows.values()))
    values = np.full((height, width), np.nan)
    for row, entries in rows.items():
        values[row, : len(entries)] = entries
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **options)
    num_branches = height // BRANCHES_PER_LAYER * BRANCHES_PER_LAYER
    _integer_ticks(axes.xaxis, width)
    _branch_ticks(axes, axes.yaxis, num_branches, end=height > num_branches)
    return image


def _branch_ticks(axes: Axes, axis: Any, num_branches: int, end: bool) -> None:
    """One tick a layer, at its attention branch, and with ``end`` one for the final read."""
    step = max(1, num_branches // BRANCHES_PER_LAYER // 8)
    layers = range(0, num_branches // BRANCHES_PER_LAYER, step)
    ticks, labels = [BRANCHES_PER_LAYER * layer for layer in layers], [str(layer) for layer in layers]
    axis.set_ticks([*ticks, num_branches] if end else ticks, [*labels, "end"] if end else labels)
    label = "layer (attention, feed-forward)"
    axes.set_xlabel(label) if axis is axes.xaxis else axes.set_ylabel(label)


def _integer_ticks(axis: Any, number: int) -> None:
    axis.set_ticks(range(0, number, max(1, math.ceil(number / 9))))


def _write_values(axes: Axes, values_RR: NDArray[np.float64], bright_below: float) -> None:
    for (row, column), value in np.ndenumerate(values_RR):
        colour = "white" if value < bright_below else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7)


def _panels(number: int, size: tuple[float, float], share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """``number`` panels in rows of COLUMNS, each of about ``size`` inches."""
    rows = math.ceil(number / COLUMNS)
    columns = math.ceil(number / rows)
    figure = _figure((size[0] * columns + 1.4, size[1] * rows))
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=share_y).flat)
    for axes in grid[number:]:
        axes.remove()
    return figure, grid[:number]


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _colours(name: str) -> Any:
    import matplotlib as mpl

    return mpl.colormaps[name].with_extremes(bad=ABSENT)


def _one_legend(figure: Figure, grid: Sequence[Axes]) -> None:
    """The legend of all panels together, each label once, to the right."""
    entries = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = sorted(entries, key=lambda label: (label.startswith("balance"), label))
    if entries:
        figure.legend([entries[label] for label in labels], labels, loc="outside right center")


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rc("svg", hashsalt="darlit", fonttype="none")
        mpl.rc("font", family="DejaVu Sans", size=9)
        mpl.rc("axes", titlesize=10)
        mpl.rc("axes.spines", top=False, right=False)
        mpl.rc("legend", frameon=False, fontsize=8)
        yield
