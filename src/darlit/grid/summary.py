"""``summary.json``: what a finished run leaves, as types, and a reader that says what is wrong with a bad file.

The file is written last and atomically, so its presence means that the run is done. This module is the schema's only
definition; whoever writes a summary passes it through :func:`validate` first.
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any, TypedDict

from darlit.errors import DarlitError
from darlit.run import SCHEMA_VERSION


class Hardware(TypedDict):
    device: str
    cores: int
    memory_gib: float
    gpus: int


class Budget(TypedDict):
    tokens: int
    batch_tokens: int
    steps: int
    sequence_length: int
    val_batches: int
    val_tokens: int


class LaterData(TypedDict, total=False):
    """Fields of `Data` that earlier summaries lack."""

    train_tokens: int


class Data(LaterData):
    fingerprint: str
    tokenizer: str
    vocab_size: int
    bytes_per_token: float  # of the scored validation targets; in summaries without train_tokens of the complete split


class TrainCurve(TypedDict):
    step: list[int]
    tokens: list[int]
    loss: list[float]


class ValidationCurve(TypedDict):
    step: list[int]
    tokens: list[int]
    loss: list[float]
    seconds: list[float]  # training seconds so far by the summary's clock, validation and restarts not counted


class Curve(TypedDict):
    train: TrainCurve
    val: ValidationCurve


class Parameters(TypedDict):
    total: int
    active: int
    pathway: int


class LaterFields(TypedDict, total=False):
    """Fields of `Summary` that earlier summaries lack."""

    passes: float  # over the training tokens of the corpus
    loader_share: float  # of the wall time between steps, in which training waited for data


class Summary(LaterFields):
    """One finished run: one cell of the grid under one seed. Losses are in nats per token."""

    schema_version: int
    cell: str
    arm: str
    size: str
    seed: int
    identity: dict[str, Any]  # what the run is (`darlit.run`); empty in a summary of version 1
    devices: int  # over all nodes; 0 in a summary of version 1, which does not say
    git_revision: str | None  # with -dirty where the checkout was changed; several where a resumed run saw several
    versions: dict[str, str]
    hardware: Hardware
    budget: Budget
    data: Data
    backbone: dict[str, Any]
    optimizer: dict[str, Any]  # with the schedule
    precision: str
    pathway: dict[str, Any]
    tokens_seen: int
    val_loss_final: float
    val_loss_best: float
    bits_per_byte: float
    curve: Curve
    clock: str  # what steps are timed with: wall, or the CPU time of the one-threaded process
    tokens_per_second: float  # from the end of one step to the end of the next, without the first ones of a start
    step_time_median_s: float
    peak_memory_bytes: int
    parameters: Parameters
    flops_per_token: float
    wall_time_s: float
    restarts: int
    health: dict[str, float]


# What two otherwise identical runs may disagree on: dotted paths into the summary.
TIMING_FIELDS = (
    "devices",
    "tokens_per_second",
    "loader_share",
    "step_time_median_s",
    "wall_time_s",
    "peak_memory_bytes",
    "curve.val.seconds",
    "hardware",
    "versions",
    "git_revision",
    "restarts",
)

# What every run of one comparison must agree on, under the name that a refusal uses.
EQUAL_FIELDS = {
    "data fingerprint": "data.fingerprint",
    "tokenizer": "data.tokenizer",
    "vocabulary": "data.vocab_size",
    "tokens": "budget.tokens",
    "batch in tokens": "budget.batch_tokens",
    "steps": "budget.steps",
    "sequence length": "budget.sequence_length",
    "validation batches": "budget.val_batches",
    "validation tokens": "budget.val_tokens",
    "tokens seen": "tokens_seen",
    "backbone": "backbone",
    "optimizer": "optimizer",
    "precision": "precision",
    "clock": "clock",
}


class SummaryError(DarlitError):
    """A summary that cannot be used; the message says which file, which field and what to do."""


def read_summary(path: str | Path) -> Summary:
    """Read and check one ``summary.json``.

    Raises:
        SummaryError: the file is missing, is not JSON, or departs from :class:`Summary`.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SummaryError(f"{path}: cannot be read: {error.strerror}; give a finished run's folder") from error
    except ValueError as error:
        raise SummaryError(f"{path}: not a JSON file ({error}); delete it and resume the run") from error
    return validate(content, where=str(path))


def last_validation(summary: Summary) -> str | None:
    """``at step S of N`` where a run was validated last before its last step, so that its loss is not of its budget."""
    validated, steps = summary["curve"]["val"]["step"][-1:] or [0], summary["budget"]["steps"]
    return None if validated == [steps] else f"at step {validated[0]} of {steps}"


def check_last_validation(summary: Summary, path: str | Path) -> None:
    """Raise SummaryError where the loss of a run is not that of its last step."""
    if at := last_validation(summary):
        raise SummaryError(
            f"{path}: was validated last {at}: its loss is not that of its budget; train it again, or move it away "
            "(darlit grid choose takes it with --partial, and marks it)"
        )


def validate(content: Any, where: str = "summary") -> Summary:
    """Return ``content`` typed as a summary, or raise a :class:`SummaryError` that names the first wrong field."""
    if not isinstance(content, dict):
        raise SummaryError(f"{where}: holds a {type(content).__name__}, a summary is a mapping of fields")
    version = content.get("schema_version")
    if version not in (1, SCHEMA_VERSION):
        raise SummaryError(
            f"{where}: schema_version is {version!r}, this darlit reads 1 to {SCHEMA_VERSION}; "
            "use the darlit version that wrote the run, or train it again"
        )
    if version == 1:
        content = {**content, "identity": {}, "devices": 0}
    _check(content, Summary, "", where)
    for part in ("train", "val"):
        lengths = {key: len(values) for key, values in content["curve"][part].items()}
        if len(set(lengths.values())) > 1:
            raise SummaryError(f"{where}: curve.{part} has lists of unequal length: {lengths}; train the run again")
    return typing.cast(Summary, content)


def without_timing(summary: Summary) -> dict[str, Any]:
    """Return a copy without :data:`TIMING_FIELDS`: what must be bitwise equal between identical runs."""
    rest: dict[str, Any] = json.loads(json.dumps(summary))
    for field in TIMING_FIELDS:
        *parents, last = field.split(".")
        node = rest
        for parent in parents:
            node = node[parent]
        node.pop(last, None)
    return rest


def field_value(summary: Summary, field: str) -> Any:
    """Return the value at a dotted path such as ``budget.tokens``."""
    node: Any = summary
    for key in field.split("."):
        node = node[key]
    return node


def _check(value: Any, kind: Any, field: str, where: str) -> None:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if typing.is_typeddict(kind):
        _expect(isinstance(value, dict), value, "a mapping", field, where)
        for key, inner in _fields(kind).items():
            name = f"{field}.{key}" if field else key
            if key not in value:
                if key in kind.__optional_keys__:
                    continue
                raise SummaryError(f"{where}: field '{name}' is missing; train the run again with this darlit")
            _check(value[key], inner, name, where)
    elif origin is list:
        accepted = _scalar_types(arguments[0])
        fine = isinstance(value, list) and all(type(item) in accepted for item in value)
        _expect(fine, value, f"a list of {arguments[0].__name__}", field, where)
    elif origin is dict:
        _expect(isinstance(value, dict), value, "a mapping", field, where)
        if arguments[1] is not Any:
            for key, item in value.items():
                _check(item, arguments[1], f"{field}.{key}", where)
    elif origin in (types.UnionType, typing.Union):
        accepted = tuple(kind for argument in arguments for kind in _scalar_types(argument))
        _expect(type(value) in accepted, value, "text or null", field, where)
    else:
        _expect(type(value) in _scalar_types(kind), value, kind.__name__, field, where)


_HINTS: dict[Any, dict[str, Any]] = {
    kind: typing.get_type_hints(kind)
    for kind in (Hardware, Budget, Data, TrainCurve, ValidationCurve, Curve, Parameters, Summary)
}


def _fields(kind: Any) -> dict[str, Any]:
    return _HINTS[kind]


def _scalar_types(kind: Any) -> tuple[type, ...]:
    return (float, int) if kind is float else (kind,)


def _expect(fine: bool, value: Any, kind: str, field: str, where: str) -> None:
    if not fine:
        shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
        raise SummaryError(f"{where}: field '{field}' is {shown}, expected {kind}; train the run again")
