"""The parser of the verbs whose options are few: argparse with one-line errors and numbers as in experiment files."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import yaml

from darlit.errors import DarlitError, nearest
from darlit.values import load


class Parser(argparse.ArgumentParser):
    """Takes options by their full names, integers as ``1e6`` too, and raises one-line errors instead of exiting."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.register("type", int, _whole)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        """Raise a DarlitError with the nearest valid name for one that is not known."""
        message = " ".join(message.split())
        if found := re.match(r"unrecognized arguments: (-[^ =]*)", message):
            message = f"no option {found[1]}; {nearest(found[1], sorted(set(_names(self))))}"
        elif found := re.match(r"argument (.*): invalid choice: '(.*)' \(choose from (.*)\)", message):
            choices = re.findall(r"[^', ]+", found[3])
            message = f"{found[1]} {found[2]!r} is not allowed; {nearest(found[2], choices)}"
        raise DarlitError(f"{message} (see {self.prog} --help)")


def _names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options of a parser and of the verbs below it."""
    for action in parser._actions:
        yield from (name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _names(below)


def _whole(text: str) -> int:
    value = _loaded(text)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return value


def _number(text: str) -> float:
    value = _loaded(text)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(value)


def _loaded(text: str) -> Any:
    try:
        return load(text)
    except (yaml.YAMLError, DarlitError):
        return None
