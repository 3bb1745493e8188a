"""Experiment files: one YAML that works alone because its ``base:`` names the files it builds on.

``base: [../configs/trainer/cpu.yaml, ...]`` is read relative to the file that holds it, first to last, and the
file's own keys come on top. Mappings merge key by key; anything else is replaced. No torch here, so that
``darlit grid`` and ``darlit results`` answer at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from darlit.errors import DarlitError
from darlit.values import load

MAX_STEPS = "DARLIT_MAX_STEPS"
AUTO = "auto"
PATHWAY, BACKBONE = "model.init_args.pathway", "model.init_args.backbone"


class ExperimentError(DarlitError):
    """An experiment file that cannot be used; the message says which, why and what to do."""


SHARED_ARGUMENTS = ("backbone", "optimizer")
"""What every class of a model takes, in the same meaning."""


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return ``below`` with ``above`` on top: mappings merge recursively, all else is replaced.

    Where ``above`` names another ``class_path``, arguments of the class below are dropped, those that every class of a
    model takes excepted: another pathway may have an option of the same name and another meaning.
    """
    merged = dict(below)
    if _is_other_class(below, above) and isinstance(below.get("init_args"), dict):
        merged["init_args"] = {key: value for key, value in below["init_args"].items() if key in SHARED_ARGUMENTS}
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _is_other_class(below: dict[str, Any], above: dict[str, Any]) -> bool:
    """Whether both name a class and not the same, which may be written with its module or without."""
    ours, theirs = (side.get("class_path") for side in (below, above))
    return ours is not None and theirs is not None and str(ours).rpartition(".")[2] != str(theirs).rpartition(".")[2]


def size_and_arm(cell: str) -> tuple[str, str]:
    """Split a cell's name ``<size>_<arm>`` or ``<size>_moe_<arm>``; a name without a size is its own arm."""
    size, _, arm = cell.partition("_")
    if arm.startswith("moe_"):
        size, arm = f"{size}_moe", arm.removeprefix("moe_")
    return size, arm or cell


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    merged: dict[str, Any] = {}
    for name, value in values.items():
        for key in reversed(name.split(".")):
            value = {key: value}
        merged = merge(merged, value)
    return merged


def load_experiment(path: str | Path) -> dict[str, Any]:
    """Read an experiment file with its complete ``base:`` chain as one plain dictionary.

    Raises:
        ExperimentError: a file that is missing, unreadable, not a mapping, or whose bases form a loop; or a block size
            that cannot be worked out.
    """
    return load_experiments([path])


def load_experiments(paths: Iterable[str | Path], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read several experiment files as one: later files win, and ``changes``, a nested mapping, over all of them."""
    return with_block_size(load_parts(paths, changes))


def load_parts(paths: Iterable[str | Path], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The same, with ``block_size: auto`` left as it is: for files that state no depth."""
    merged: dict[str, Any] = {}
    for path in paths:
        merged = merge(merged, _load(Path(path), chain=()))
    return merge(merged, dict(changes or {}))


def with_block_size(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with a number for ``pathway.block_size: auto``: about eight blocks, of 2 layers or more.

    Raises:
        ExperimentError: the configuration does not say how many layers there are.
    """
    if inner(config, PATHWAY).get("block_size") != AUTO:
        return config
    layers = inner(config, BACKBONE).get("num_layers")
    layers = load(layers) if isinstance(layers, str) else layers
    if type(layers) is not int or layers < 1:
        raise ExperimentError(
            f"pathway.block_size=auto is worked out from backbone.num_layers, which is {layers!r} here; "
            "add a size, such as --config configs/size/small.yaml, or give a number"
        )
    return merge(config, nested({f"{PATHWAY}.block_size": max(2, math.ceil(layers / 8))}))


def inner(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The mapping under a dotted name; empty where there is none."""
    found: Any = config
    for key in name.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def max_steps() -> int | None:
    """Steps that ``DARLIT_MAX_STEPS`` leaves of every run, to try commands out; None where it is not set.

    Raises:
        ExperimentError: a value that is not a whole number from 1.
    """
    value = os.environ.get(MAX_STEPS)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and int(value)):
        raise ExperimentError(f"{MAX_STEPS}={value!r} is not allowed; give a whole number from 1, or unset it")
    return int(value)


def shortened(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return ``config`` with a budget of at most :func:`max_steps` steps.

    The budget is part of a run's record and of the equal-budget check, so a shortened run is never taken for another.

    Raises:
        ExperimentError: ``name``, the experiment, states no budget that could be shortened.
    """
    steps = max_steps()
    if steps is None:
        return config
    budget = config.get("budget")
    try:
        tokens, batch_tokens = (int(float(budget[key])) for key in ("tokens", "batch_tokens"))  # type: ignore[index]
    except (TypeError, KeyError, ValueError) as error:
        raise ExperimentError(f"{name}: {MAX_STEPS} needs budget.tokens and budget.batch_tokens in the file") from error
    return merge(config, {"budget": {"tokens": min(tokens, steps * batch_tokens)}})


def shortening() -> str | None:
    """The line that every command that trains prints first while runs are shortened."""
    steps = max_steps()
    line = f"{MAX_STEPS}={steps}: runs are shortened to {steps} steps, to try commands out; they are not results"
    return None if steps is None else line


def _load(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in chain:
        loop = " -> ".join(step.name for step in (*chain[chain.index(resolved) :], resolved))
        raise ExperimentError(f"{chain[-1]}: its base chain loops: {loop}; remove one of these base entries")
    if not resolved.is_file():
        where = f"{chain[-1]}: base '{path}'" if chain else f"config '{path}'"
        raise ExperimentError(f"{where} does not exist; give a path relative to the file that names it")

    content = _read_mapping(path)
    bases = content.pop("base", [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ExperimentError(f"{path}: base must be a path or a list of paths, not {bases!r}")

    merged: dict[str, Any] = {}
    for base in bases:
        merged = merge(merged, _load(resolved.parent / base, (*chain, resolved)))
    return merge(merged, content)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = load(path.read_text(encoding="utf-8"))
    except DarlitError as error:
        raise ExperimentError(f"{path}, {error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ExperimentError(f"{path}: not a readable YAML file: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ExperimentError(f"{path}: holds a {type(content).__name__}, an experiment is a mapping of keys")
    return content
