"""The settings of an experiment by their types: one way from YAML and options to values, for every verb.

`typed` is what fit, validate, plan and grid check make of an experiment; `complete` adds the defaults, so that a
default that is written out equals one that is not. Nothing here imports Lightning, which takes longer than a plan.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from darlit.catalog import PATHWAYS
from darlit.errors import DarlitError, nearest
from darlit.experiment import load_experiment, merge, with_block_size
from darlit.fields import check_option, convert, convert_fields, field_types
from darlit.values import Text, load

LINKED = {
    "trainer.max_steps": "budget.tokens // budget.batch_tokens; set budget.tokens",
    "trainer.accumulate_grad_batches": "computed from budget.batch_tokens and the devices; set budget.batch_tokens",
    "trainer.val_check_interval": "computed from budget.validation_interval; set budget.validation_interval",
    "trainer.default_root_dir": "runs_dir/cell/seed_<seed_everything>; set runs_dir, cell or seed_everything",
    "model.init_args.backbone.sequence_length": "data.sequence_length; set data.sequence_length",
    "data.seed": "seed_everything; set seed_everything",
}
"""Values that are computed from others, and what to set instead."""
_SAME_AS_UNSET = {"trainer.accumulate_grad_batches": 1}

SCALARS: dict[str, Any] = {"seed_everything": int, "cell": str, "runs_dir": str, "overwrite": bool}
OTHERS = ("ckpt_path", "weights_only", "memory_estimate", "non_finite", "pictures", "throughput")
"""Keys of an experiment whose content only `darlit.cli` knows."""
KEYS = ("model", "data", "budget", "trainer", *SCALARS, *OTHERS)

_GROUPS = (
    *("data", "budget", "trainer", "model", "model.init_args"),
    *(f"model.init_args.{part}" for part in ("backbone", "optimizer", "pathway")),
)
SEEDS = 2**32
"""Seeds are below."""
Precision = Literal[  # Lightning names
    "32-true",
    "bf16-mixed",
    "bf16-true",
    "16-mixed",
    "16-true",
    "64-true",
    "transformer-engine",
    "transformer-engine-float16",
]
PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""Lightning's short names of precisions, and what they mean."""


@dataclass(frozen=True)
class TrainerOptions:
    """What this repository reads of Lightning's trainer; None is Lightning's default."""

    accelerator: str | None = None
    devices: int | str | list[int] | None = None
    num_nodes: int | None = None
    precision: Precision | None = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    limit_val_batches: int | float | None = None
    log_every_n_steps: int | None = None


TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": -1,
    "gradient_clip_val": 1.0,
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "inference_mode": False,  # an evaluation is without gradients; FSDP2 cannot gather parameters as inference tensors
}


def read_options(options: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings among command-line options as a mapping, and all other options as they are.

    ``--model.backbone.width 64``, ``--model.init_args.backbone.width=64``, ``--model CLASS``, ``--data '{seed: 5}'``
    and ``--trainer FILE`` are settings.

    Raises:
        DarlitError: an option without its value, or a group that is neither a mapping nor a file.
    """
    given: dict[str, Any] = {}
    others: list[str] = []
    rest = list(options)
    while rest:
        option = rest.pop(0)
        name, equals, value = option.partition("=")
        path = _setting(name)
        if path is None:
            others.append(option)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise DarlitError(f"{name} needs a value; write {name}=VALUE")
            value = rest.pop(0)
        given = merge(given, _nested(path, _value(name, path, value)))
    return given, others


def refuse_linked(config: Mapping[str, Any]) -> None:
    """Raise if a linked value is set by hand, wherever it was written.

    Raises:
        DarlitError: names the value, how it is computed, and what to set instead.
    """
    for target, source in LINKED.items():
        value: Any = config
        for key in target.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        value = load(value) if isinstance(value, Text) else value
        if value is not None and value != _SAME_AS_UNSET.get(target):
            raise DarlitError(f"{target} cannot be set by hand, it is {source}")


def typed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment with every setting as its field's type; what it does not say stays unsaid.

    Raises:
        DarlitError: a key that is not known, a value of another type or out of range, or a linked value.
    """
    return _read(config, defaults=False)


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `typed`, with the default of every setting that it does not say, linked values excepted."""
    return _read(config, defaults=True)


def class_of(class_path: str) -> type[Any] | str:
    """Return the name of a pathway for one of darlit's own classes, and the class for one of the user's.

    Raises:
        DarlitError: no such class, or not a language module.
    """
    home, _, name = class_path.rpartition(".")
    if not home or (home.startswith("darlit.modules.") and name in PATHWAYS):
        if name not in PATHWAYS:
            raise DarlitError(f"model.class_path is {class_path!r}; {nearest(name, sorted(PATHWAYS))}")
        return PATHWAYS[name]
    from darlit.modules.arms import own_variant

    return own_variant(class_path)


def _read(config: Mapping[str, Any], defaults: bool) -> dict[str, Any]:
    from darlit.data.options import DataOptions
    from darlit.modules.budget import Budget

    for key in config:
        if key not in KEYS:
            raise DarlitError(f"an experiment has no key {key!r}; {nearest(str(key), KEYS)}")
    refuse_linked(config)
    content = with_block_size(dict(config))
    for key, hint in SCALARS.items():
        if key in content:
            content[key] = convert(key, content[key], hint)
    seed = content.get("seed_everything", 0)
    check_option("seed_everything", seed, is_seed(seed), f"a whole number from 0 to {SEEDS - 1}")
    for group, options in (("budget", Budget), ("data", DataOptions)):
        if group in content or defaults:
            content[group] = _group(group, content.get(group, {}), options, defaults)
    if "trainer" in content or defaults:
        content["trainer"] = _trainer(content.get("trainer", {}), defaults)
    if "model" in content:
        length = content.get("data", {}).get("sequence_length", DataOptions.sequence_length)
        content["model"] = _model(content["model"], length, defaults)
    return content


def is_seed(value: Any) -> bool:
    """Whether this is a whole number that every random generator takes."""
    return type(value) is int and 0 <= value < SEEDS


def _group(name: str, values: Any, options: type[Any], defaults: bool, **linked: Any) -> dict[str, Any]:
    """The converted values of one group; the dataclass checks their ranges."""
    known, given = field_types(options), convert_fields(name, values, options)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever builds the model is warned
        made = options(**{**given, **linked})
    said = given if not defaults else [key for key in known if f"{name}.{key}" not in LINKED]
    return {key: getattr(made, key) for key in known if key in said}


def _trainer(values: Any, defaults: bool) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        convert_fields("trainer", values, TrainerOptions)  # says what is wrong
    known = field_types(TrainerOptions)
    content = {"precision": "32-true", **TRAINER_DEFAULTS, **values} if defaults else dict(values)
    for key, value in content.items():
        if key in known:
            content[key] = convert(f"trainer.{key}", _plain(key, value), known[key])
        elif key not in TRAINER_DEFAULTS and key not in _trainer_names():
            raise DarlitError(f"trainer has no option {key!r}; {nearest(str(key), _trainer_names())}")
    return content


@functools.cache
def _trainer_names() -> tuple[str, ...]:
    """The arguments of Lightning's trainer, from its source, without importing it."""
    (home,) = importlib.util.find_spec("lightning").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = ast.parse((Path(home) / "pytorch/trainer/trainer.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    made = next(
        node for node in classes["Trainer"].body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    return tuple(argument.arg for argument in (*made.args.args, *made.args.kwonlyargs) if argument.arg != "self")


def _plain(key: str, value: Any) -> Any:
    """One spelling of what Lightning spells in several ways."""
    if key == "precision" and value is not None:
        return PRECISIONS.get(str(value), str(value))
    return int(value) if key == "devices" and isinstance(value, str) and value.isdecimal() else value


def _model(values: Any, sequence_length: int, defaults: bool) -> dict[str, Any]:
    from darlit import pathways
    from darlit.backbone import BackboneConfig
    from darlit.modules.optimizer import OptimizerConfig

    model = {"class_path": values} if isinstance(values, str) else values
    if not isinstance(model, Mapping) or not isinstance(model.get("class_path"), str):
        raise DarlitError(f"model is {model!r}; name a class: model: {{class_path: DualAttentionResidualLM}}")
    for key in model:
        if key not in ("class_path", "init_args", "dict_kwargs"):
            raise DarlitError(f"model has no key {key!r}; {nearest(str(key), ('class_path', 'init_args'))}")
    class_path = str(model["class_path"])
    found = class_of(class_path)
    family = pathways.family(found if isinstance(found, str) else found.pathway_name)
    given = model.get("init_args", {})
    if not isinstance(given, Mapping):
        raise DarlitError(f"model.init_args is {given!r}; leave it out, or give a mapping such as {{backbone: ...}}")
    parts = {"pathway": family.Options, "backbone": BackboneConfig, "optimizer": OptimizerConfig}
    own = [] if isinstance(found, str) else list(inspect.signature(found).parameters)
    content = {}
    for name, value in given.items():
        if name not in parts and name not in own:
            raise DarlitError(f"model.init_args has no option {name!r}; {nearest(str(name), [*parts, *own])}")
        content[name] = load(value) if isinstance(value, Text) and name not in parts else value
    for name, options in parts.items():
        if name in given or defaults:
            linked = {"sequence_length": sequence_length} if name == "backbone" else {}
            content[name] = _group(f"model.init_args.{name}", given.get(name, {}), options, defaults, **linked)
    return {**model, "class_path": class_path, "init_args": content}


def _setting(option: str) -> list[str] | None:
    """The path into an experiment that an option sets; None: an option of another kind."""
    if not option.startswith("--") or option.endswith(("+", ".help")):
        return None
    group, *keys = option.removeprefix("--").split(".")
    if group in SCALARS and not keys:
        return [group]
    if group == "trainer" and keys:
        linked = f"trainer.{'.'.join(keys)}" in LINKED
        return [group, *keys] if linked or keys[0] in TrainerOptions.__dataclass_fields__ else None
    if group == "model" and keys and keys[0] not in ("class_path", "init_args"):
        keys = ["init_args", *keys]
    return [group, *keys] if group in ("model", "data", "budget", "trainer") else None


def _value(name: str, path: Sequence[str], text: str) -> Any:
    """What an option sets: text for a field; for a group a mapping, in line or in a file, or a class."""
    if ".".join(path) not in _GROUPS:
        return Text(text)
    try:
        value = load(text)
    except yaml.YAMLError as error:
        raise DarlitError(f"{name}: {' '.join(str(error).split())}") from error
    except DarlitError as error:
        raise DarlitError(f"{name}: {error}") from error
    if not isinstance(value, str):
        return value
    if Path(value).is_file():
        return load_experiment(value)
    if path == ["model"]:
        return {"class_path": value}
    raise DarlitError(f"{name} {value!r} is neither a file nor a mapping such as '{{name: value}}'")


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return typing.cast("dict[str, Any]", value)
