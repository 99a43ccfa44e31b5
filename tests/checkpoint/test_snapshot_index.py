"""The description of a snapshot comes back with the same types and bits."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.checkpoint.snapshot_index import Places, decode, encode

# Any eight bytes, so that NaNs with contents are among them.
FLOATS = st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack("<d", b)[0])
SIMPLE = st.one_of(
    st.none(), st.booleans(), st.integers(), FLOATS, st.text(), st.binary(max_size=9)
)
VALUES = st.recursive(SIMPLE, lambda inner: st.lists(inner, max_size=3).map(tuple))
OFFSETS = st.lists(st.integers(0, 2**50), max_size=3)
PLACES = OFFSETS.map(lambda offsets: Places(tuple(offsets)))
KEYS = st.lists(st.one_of(st.text(), st.integers()), max_size=4).map(tuple)


def exact(value: Any) -> Any:
    """Return the type of a value with what tells it apart from any other."""
    if isinstance(value, tuple):
        return tuple, [exact(part) for part in value]
    content = struct.pack("<d", value) if isinstance(value, float) else value
    return type(value), content


@given(st.dictionaries(KEYS, st.one_of(VALUES, PLACES), max_size=4))
def test_every_value_comes_back_as_it_was(entries: dict[Any, Any]) -> None:
    decoded = decode(encode(entries))
    assert [(exact(key), exact(value)) for key, value in decoded.items()] == [
        (exact(key), exact(value)) for key, value in entries.items()
    ]


def test_the_text_is_json_of_its_standard() -> None:
    entries = {("optimizer", 0, "lr"): -math.inf, ("model", "a"): Places((0, 64))}

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(encode(entries), parse_constant=refuse) == [
        [["optimizer", 0, "lr"], {"float": "000000000000f0ff"}],
        [["model", "a"], {"places": [0, 64]}],
    ]


def test_what_has_no_exact_text_is_refused_where_it_is_written() -> None:
    for value in (object(), [1], {"a": 1}, type("Own", (int,), {})(1)):
        with pytest.raises(AssertionError, match="an engine's state holds tensors"):
            encode({("key",): value})
