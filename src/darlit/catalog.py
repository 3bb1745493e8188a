"""Sizes x arms: the cells of the repository.

The cell ``<size>_<arm>`` is ``configs/size/<size>.yaml`` with ``configs/arm/<arm>.yaml`` on top. The tables here are
the only lists of sizes and arms: results, docs, plan and bench take their order from them. No torch here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from darlit.experiment import ExperimentError, load_parts, with_block_size

SIZES = ("tiny", "tiny_moe", "small", "dense0.1b", "dense0.3b", "dense0.5b", "dense1b", "moe7b")
"""In the order of tables and figures."""

ARMS = {
    "residual": "the baseline of every comparison",
    "transparent": "Transparent Attention: softmax mixtures of layer outputs",
    "denseformer": "DenseFormer: weighted sums of layer outputs",
    "attnres_full": "Attention Residuals with every branch as a source",
    "attnres_block": "Attention Residuals with blocks of layers as sources",
    "attnres_2q": "our control: one stream, two averaged queries",
    "attnres_sep_v": "routing ablation: one stream, a value matrix per source",
    "hc2": "Hyper-Connections of two streams",
    "mhc2": "manifold-constrained Hyper-Connections of two streams",
    "mhc4": "manifold-constrained Hyper-Connections of four streams",
    "dar_full": "Dual Attention Residuals with every layer as a source",
    "dar_block": "Dual Attention Residuals with blocks of layers as sources",
    "dar": "`dar_block` under the name that it has at the sizes with experts",
    "dar_self_kv": "routing ablation: keys and values of the target's stream",
    "dar_cross_v": "routing ablation: `dar_full` with its targets renamed, a check of the comparison",
    "dar_fixed_kv": "routing ablation: the same keys and values for both targets",
}
"""What each arm is, in the order of tables and figures. Class and options are in configs/arm/."""

PATHWAYS = {
    "ResidualLM": "residual",
    "TransparentLM": "transparent",
    "DenseFormerLM": "denseformer",
    "AttentionResidualLM": "attnres",
    "HyperConnectionsLM": "hyper_connections",
    "ManifoldHyperConnectionsLM": "mhc",
    "DualAttentionResidualLM": "dar",
}
"""The pathway of each class in `darlit.modules.arms`, which takes longer to import than a plan takes."""


class Arm(NamedTuple):
    """A pathway and its options, as plain values."""

    pathway: str
    options: dict[str, Any]


def arms(num_layers: int) -> dict[str, Arm]:
    """Every arm for a model of ``num_layers`` layers, without second names of the same arm."""
    found: dict[str, Arm] = {}
    for name in ARMS:
        made = arm(name, num_layers)
        if made not in found.values():
            found[name] = made
    return found


def arm(name: str, num_layers: int) -> Arm:
    """Pathway and options of an arm for a model of ``num_layers`` layers.

    Raises:
        ExperimentError: no file configs/arm/<name>.yaml.
    """
    depth = {"model": {"init_args": {"backbone": {"num_layers": num_layers}}}}
    config = with_block_size(load_parts([configs_folder() / "arm" / f"{name}.yaml"], depth))
    return Arm(PATHWAYS[config["model"]["class_path"]], config["model"]["init_args"].get("pathway", {}))


def cell_files(cell: str, near: Path | None = None) -> tuple[Path, Path]:
    """The two files of a cell that is named ``<size>_<arm>``.

    Args:
        cell: its name.
        near: see `configs_folder`.

    Raises:
        ExperimentError: no such size or arm; the message names the nearest cell.
    """
    folder = configs_folder(near)
    sizes = {file.stem: file for file in sorted((folder / "size").glob("*.yaml"))}
    variants = {file.stem: file for file in sorted((folder / "arm").glob("*.yaml"))}
    known = {f"{size}_{arm}": (sizes[size], variants[arm]) for size in sizes for arm in variants}
    if cell in known:
        return known[cell]
    near_names = difflib.get_close_matches(cell, known, n=1)
    raise ExperimentError(
        f"no cell '{cell}': a cell is SIZE_ARM, sizes are {_listed(sizes, SIZES)}, arms are "
        f"{_listed(variants, tuple(ARMS))}" + "".join(f"; did you mean {name}?" for name in near_names)
    )


def cell_name(files: Sequence[Path]) -> str:
    """The name of the cell that these files, later ones on top, make.

    A size and an arm make ``<size>_<arm>``; otherwise it is the name of the last file. Files of configs/trainer/ say
    where a cell runs, and have no part in its name.
    """
    named = [file for file in files if file.parent.name != "trainer"] or files
    parts = {file.parent.name: file.stem for file in named}
    if named[-1].parent.name in ("size", "arm") and {"size", "arm"} <= set(parts):
        return f"{parts['size']}_{parts['arm']}"
    return named[-1].stem


def configs_folder(near: Path | None = None) -> Path:
    """The nearest ``configs/`` with sizes and arms: above ``near``, above the working folder, or of this checkout."""
    starts = [*([near.resolve()] if near else []), Path.cwd()]
    above = [folder / "configs" for start in starts for folder in (start, *start.parents)]
    for configs in (*above, Path(__file__).parents[2] / "configs"):
        if (configs / "size").is_dir() and (configs / "arm").is_dir():
            return configs
    raise ExperimentError("no folder configs/ with size/ and arm/ here or above; run darlit in its repository")


def _listed(names: Iterable[str], order: Sequence[str]) -> str:
    """Names in the order of a table, then those that it lacks."""
    names = list(names)
    return ", ".join([name for name in order if name in names] + sorted(set(names) - set(order)))
