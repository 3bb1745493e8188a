"""YAML as every verb reads it: numbers, text, keys given twice, and what is written reads back."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from darlit.errors import DarlitError
from darlit.values import dump, load


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1_000_000),
        ("1.5e3", 1500),
        ("1e-6", 1e-6),
        ("2.0e-3", 2e-3),
        ("4_000_000", 4_000_000),
        ("010", 10),
        ("-7", -7),
        ("2.0", 2.0),
        ("24:00:00", "24:00:00"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("~", None),
        ("0x10", "0x10"),
        ('"010"', "010"),
    ],
)
def test_a_value_is_what_it_looks_like(text: str, value: Any) -> None:
    found = load(f"key: {text}")["key"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "x:\n  a: 1\n  b: 2\n  'a': 3\n", "[{a: 1,\n b: 2,\n a: 3}]"])
def test_a_key_given_twice_is_an_error_with_both_lines(text: str) -> None:
    with pytest.raises(DarlitError, match=r"line \d: key 'a' is given twice, first in line \d; keep one"):
        load(text)


_TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12)
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS


@given(st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner)))
def test_what_is_written_reads_back_with_its_types(content: Any) -> None:
    found = load(dump(content))
    assert found == content
    assert repr(found) == repr(content)


@pytest.mark.parametrize("text", ["1e6", "010", "1:30", "yes", "null", "2026-01-01", "0o7", "1_0", "", "~", "<<"])
def test_other_readers_of_what_is_written_see_text_too(text: str) -> None:
    assert yaml.safe_load(dump({"key": text})) == {"key": text}
