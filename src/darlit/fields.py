"""The fields of option dataclasses: what is read becomes their types, what is given in code is checked.

Both speak in one line. A type is an annotation made of int, float, bool, str, ``Literal``, lists and unions with None.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from darlit.errors import DarlitError, nearest
from darlit.values import Text, load

if TYPE_CHECKING:
    from pydantic import TypeAdapter


def check_option(name: str, value: object, valid: bool, allowed: object) -> None:
    """Raise a one-line DarlitError (a ValueError) that names the option, its value and what is allowed."""
    if not valid:
        choices = ", ".join(map(str, allowed)) if isinstance(allowed, tuple) else allowed
        raise DarlitError(f"{name}={value!r} is not allowed; {name} must be {choices}")


def check_fields(options: Any, prefix: str = "") -> None:
    """Raise a one-line DarlitError at the first field of a dataclass whose value is not of its type.

    An integer may stand for a float; a bool stands for nothing else; floats must be finite.
    """
    kind: Any = type(options)
    for name, hint in field_types(kind).items():
        value = getattr(options, name)
        check_option(prefix + name, value, _is_of(value, hint), _words(hint))


@functools.cache
def field_types(options: Any) -> dict[str, Any]:
    """Return the type of every field of a dataclass, by name."""
    hints = get_type_hints(options)
    return {name: hints[name] for name in options.__dataclass_fields__}


def convert(name: str, value: Any, hint: Any) -> Any:
    """Return a value that was read, from a file or the command line, as its field's type.

    Args:
        name: the field, for the error.
        value: of YAML, or `Text` from the command line.
        hint: the field's type.

    Raises:
        DarlitError: a value that is not of that type.
    """
    from pydantic import ValidationError

    if isinstance(value, str):  # quoted in YAML as good as typed: "1.0" must stay a share and not become one batch
        value = _untyped(value, hint)
    try:
        # A bool is an int to pydantic; `num_layers: true` is a mistake here.
        if isinstance(value, bool) and not {bool, Any} & set(_members(hint)):
            raise TypeError
        converted = _adapter(hint).validate_python(value)
    except (ValidationError, TypeError) as error:
        raise DarlitError(f"{name}={value!r} is not allowed; {name} must be {_words(hint)}") from error
    check_option(name, value, _is_of(converted, hint), _words(hint))
    return converted


def convert_fields(prefix: str, values: Any, options: Any) -> dict[str, Any]:
    """Return a mapping that was read with every value as the type of its field in ``options``, a dataclass.

    Raises:
        DarlitError: not a mapping, a key that is not a field, or a value of another type.
    """
    known = field_types(options)
    if isinstance(values, Text):
        values = load(values)
    if not isinstance(values, Mapping):
        shown = "null" if values is None else repr(values)
        example = f"such as {{{next(iter(known))}: ...}}" if known else "{}, it has no options"
        raise DarlitError(f"{prefix} is {shown}; leave it out, or give a mapping {example}")
    for key in values:
        if key not in known:
            raise DarlitError(f"{prefix} has no option {key!r}; {nearest(str(key), known)}")
    return {key: convert(f"{prefix}.{key}", value, known[key]) for key, value in values.items()}


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _untyped(text: str, hint: Any) -> Any:
    """A text as its field has it: itself where the field is text, else what YAML says it is."""
    as_it_is = all(member in (str, type(None)) or get_origin(member) is Literal for member in _members(hint))
    if as_it_is and text != "null":
        return str(text)
    try:
        return load(text)
    except yaml.YAMLError:
        return str(text)


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_of(value: Any, hint: Any) -> bool:
    if len(_members(hint)) > 1:
        return any(_is_of(value, member) for member in _members(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint if hint in (int, bool, str, type(None)) else True


def _words(hint: Any) -> str:
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", type(None): "null"}
    return " or ".join(words.get(member) or _words_of_other(member) for member in _members(hint))


def _words_of_other(hint: Any) -> str:
    return ", ".join(map(str, get_args(hint))) if get_origin(hint) is Literal else str(hint)
