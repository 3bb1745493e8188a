"""Fields of the option dataclasses: types, finite numbers and ranges, each flipped; conversion of what is read."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from darlit.backbone import BackboneConfig
from darlit.data.options import DataOptions
from darlit.data.prepare import Options as PrepareOptions
from darlit.errors import DarlitError
from darlit.fields import convert, convert_fields, field_types
from darlit.modules import Budget, OptimizerConfig
from darlit.pathways import families
from darlit.values import Text

CLASSES = [
    BackboneConfig, OptimizerConfig, Budget, DataOptions, PrepareOptions,
    *sorted({family.Options for family in families().values()}, key=lambda options: options.__name__),
]  # fmt: skip


def _fields() -> list[tuple[Any, str]]:
    return [(options, name) for options in CLASSES for name in field_types(options)]


@pytest.mark.parametrize(("options", "name"), _fields(), ids=lambda value: getattr(value, "__name__", value))
def test_no_field_takes_a_value_of_another_type(options: Any, name: str) -> None:
    """A new field is tried here by itself: its type must keep out these values."""
    hint = str(field_types(options)[name])
    wrong: list[Any] = [[1], {"a": 1}]
    if "bool" not in hint:
        wrong.append(True)
    if "int" in hint or "float" in hint:
        wrong += ["1", float("inf"), float("nan")]
    if "int" in hint and "float" not in hint:
        wrong += [1.5, 2.0]
    if "str" in hint or "Literal" in hint:
        wrong.append(3)
    if "None" not in hint:
        wrong.append(None)
    for value in wrong:
        with pytest.raises(DarlitError, match=name) as caught:
            options(**{name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        (families()["dar"].Options, {"block_size": 1.5}, "block_size=1.5 is not allowed; block_size must be a whole"),
        (families()["dar"].Options, {"rho_logit": float("inf")}, "rho_logit=inf is not allowed"),
        (families()["dar"].Options, {"rho_logit": 40.0}, "rho_logit must be between -16 and 16"),
        (families()["mhc"].Options, {"res_logit": 60.0}, "res_logit must be between -16 and 16"),
        (BackboneConfig, {"norm_eps": -1.0}, "backbone.norm_eps=-1.0 is not allowed"),
        (BackboneConfig, {"norm_eps": 1.0}, "backbone.norm_eps must be above 0 and below 1"),
        (BackboneConfig, {"document_separator": 257}, "backbone.document_separator=257 is not allowed"),
        (OptimizerConfig, {"beta2": 1.0}, "optimizer.beta2=1.0 is not allowed"),
        (OptimizerConfig, {"learning_rate": -1.0}, "optimizer.learning_rate=-1.0 is not allowed"),
        (Budget, {"validation_interval": 0}, "budget.validation_interval=0 is not allowed"),
        (DataOptions, {"num_workers": -1}, "num_workers -1 must be at least 0"),
    ],
)
def test_a_value_out_of_range_is_one_line(options: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DarlitError, match=said):
        options(**changes)


@pytest.mark.parametrize("eps", [-1.0, float("inf"), float("nan")])
def test_a_pathway_built_by_hand_checks_its_eps_too(eps: float) -> None:
    from darlit.pathways import build

    with pytest.raises(DarlitError, match="norm_eps=.* is not allowed"):
        build("dar", num_branches=4, width=8, norm_eps=eps)


@pytest.mark.parametrize(
    ("value", "hint", "converted"),
    [
        ("false", bool, False),
        ("1e-6", float, 1e-6),
        (3, float, 3.0),
        (1e6, int, 1_000_000),
        ("12", int, 12),
        (Text("010"), int, 10),
        (Text("1e9"), int, 1_000_000_000),
        (Text("010"), str | None, "010"),
        (Text("null"), str | None, None),
        (Text("norm"), Literal["norm", "value"] | None, "norm"),
        (Text("[0, 1]"), int | str | list[int], [0, 1]),
    ],
)
def test_what_is_read_becomes_its_type(value: Any, hint: Any, converted: Any) -> None:
    found = convert("name", value, hint)
    assert (found, type(found)) == (converted, type(converted))


@pytest.mark.parametrize(
    ("value", "hint"),
    [(True, int), (True, float), (1.5, int), ("many", int), (3, str), ("sideways", Literal["a", "b"]), (".inf", float)],
)
def test_what_does_not_fit_its_type_is_one_line(value: Any, hint: Any) -> None:
    with pytest.raises(DarlitError, match="^name=.* is not allowed; name must be ") as caught:
        convert("name", value, hint)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(DarlitError, match="budget has no option 'token'; did you mean tokens?"):
        convert_fields("budget", {"token": 1}, Budget)


def test_defaults_are_valid() -> None:
    for options in CLASSES:
        assert dataclasses.asdict(options()) == convert_fields("x", dataclasses.asdict(options()), options)


@pytest.mark.parametrize("written", [1.0, "1.0", Text("1.0")])
def test_a_share_never_becomes_a_count(written: object) -> None:
    """``limit_val_batches`` of 1.0 is all batches, of 1 it is one."""
    assert type(convert("limit_val_batches", written, int | float | None)) is float
    assert type(convert("limit_val_batches", 1, int | float | None)) is int
