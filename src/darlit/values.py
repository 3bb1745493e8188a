"""YAML as every verb reads and writes it, by the rules of YAML 1.2, which have no surprises.

``1e6``, ``1e-6`` and ``4_000_000`` are numbers, a whole one being an integer; ``010`` is ten; ``24:00:00``, ``yes`` and
``2026-01-01`` are text; a key that is given twice in one mapping is an error. PyYAML by itself follows YAML 1.1, where
these are text, text, eight, 86400, true, a date, and the last of the two.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from darlit.errors import DarlitError

_BOOL, _INT, _FLOAT, _NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "null"))
_RESOLVERS = (
    (_BOOL, re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    (_INT, re.compile(r"[-+]?[0-9][0-9_]*"), "-+0123456789"),
    (
        _FLOAT,
        re.compile(
            r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        "-+.0123456789",
    ),
    (_NULL, re.compile(r"~|null|Null|NULL|"), "~nN\0"),
    ("tag:yaml.org,2002:merge", re.compile(r"<<"), "<"),
)
_EXACT = 2**53
"""Whole numbers up to here are exact as floating-point numbers."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012, PyYAML's own protocol

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key.value, str):
                if key.value in lines:
                    raise DarlitError(
                        f"line {line}: key {key.value!r} is given twice, first in line {lines[key.value]}; keep one"
                    )
                lines[key.value] = line
        return super().construct_mapping(node, deep)

    def _integer(self, node: Any) -> int:
        return int(self.construct_scalar(node).replace("_", ""))

    def _number(self, node: Any) -> int | float:
        text = self.construct_scalar(node).replace("_", "").lower()
        value = float(re.sub(r"\.(inf|nan)", r"\1", text))
        return int(value) if "e" in text and abs(value) <= _EXACT and value.is_integer() else value


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as anything else."""

    yaml_implicit_resolvers = {key: list(found) for key, found in yaml.SafeDumper.yaml_implicit_resolvers.items()}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    _whole = re.compile(f"(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(_tag, _whole, ["" if letter == "\0" else letter for letter in _first])
    _Dumper.add_implicit_resolver(_tag, _whole, ["" if letter == "\0" else letter for letter in _first])
_Loader.add_constructor(_INT, _Loader._integer)
_Loader.add_constructor(_FLOAT, _Loader._number)


class Text(str):
    """A value as it was typed in a shell: what it means depends on the type of its field."""

    __slots__ = ()


_Dumper.add_representer(Text, yaml.SafeDumper.represent_str)


def load(text: str) -> Any:
    """Return what a YAML text says.

    Raises:
        yaml.YAMLError: not YAML.
        DarlitError: a key that is given twice, with both lines.
    """
    return yaml.load(text, Loader=_Loader)


def dump(content: Any) -> str:
    """Return ``content`` as YAML, its keys in their order; `load` returns the same content."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
