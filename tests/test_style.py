"""The code base keeps to the words and to the size of functions that `style.py` lists."""

from __future__ import annotations

import ast

import pytest

from tests import style


@pytest.fixture(scope="module")
def product() -> list[style.Module]:
    return style.modules()


def module(text: str, path: str = "example.py") -> style.Module:
    return style.Module(path, text, ast.parse(text))


def test_nothing_makes_a_reader_stumble(product: list[style.Module]) -> None:
    places = style.places(product)
    assert not places, "\n".join(str(place) for place in places)


def test_no_value_of_a_test_has_a_name_that_begins_with_of() -> None:
    tests = style.modules(["tests"])
    places = [place for module in tests for place in style.names_with_of(module)]
    assert not places, "\n".join(str(place) for place in places)


def test_the_code_is_not_dense(product: list[style.Module]) -> None:
    measures = style.measure(product)
    assert measures.characters_per_line <= 40
    assert measures.packed_percent <= 2
    assert measures.conditionals_per_1000 <= 14


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("found = 1", "the name `found`"),
        ("def f(told): pass", "the name `told`"),
        ("for one in []: pass", "the name `one`"),
        ("tried = 1", "the name `tried`"),
        ("of_rows = 1", "the name `of_rows`"),
        ("def f(*of_rows): pass", "the name `of_rows`"),
        ("self._of_rows = 1", "the name `_of_rows`"),
        ("OF_ROWS = 1", "the name `OF_ROWS`"),
        ('"""Of a thing."""', "the docstring begins with 'Of'"),
        ("def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        ("class A: pass\nclass A: pass", "the class A exists already, in example.py"),
    ],
)
def test_each_rule_finds_its_place(text: str, rule: str) -> None:
    places = style.places([module(text)])
    assert [place.rule for place in places] == [rule]
    assert str(places[0]).startswith("example.py:")


@pytest.mark.parametrize(
    "text",
    [
        "from verl_ray.config.b import B",
        "from verl_ray.config import b",
        "import verl_ray.config.b",
        "if TYPE_CHECKING:\n    from verl_ray.config.b import B",
        "def f():\n    from verl_ray.config.b import B",
    ],
)
def test_a_circle_of_imports_is_in_each_of_its_modules(text: str) -> None:
    parsed = [
        module(text, "verl_ray/config/a.py"),
        module("from verl_ray.config.c import C", "verl_ray/config/b.py"),
        module("from verl_ray.config.a import A", "verl_ray/config/c.py"),
        module("from verl_ray.config.a import A", "verl_ray/config/d.py"),
    ]
    places = style.places(parsed)
    assert [place.rule for place in places] == ["a circle of imports"] * 3
    assert {place.path[-4:-3] for place in places} == {"a", "b", "c"}
    assert not style.places(parsed[1:])


def test_good_code_breaks_no_rule() -> None:
    text = '"""Rows of a batch."""\n\nrows = 1\n\ndef of_rows(): pass\n'
    assert style.places([module(text)]) == []


def test_measures_by_hand() -> None:
    # Lines of 8, 9, 11 and 23 characters after the indentation, and an empty one.
    text = "def f():\n    # Reason.\n\n    a, b = 1, 2\n    return a if b else None\n"
    measures = style.measure([module(text)])
    assert measures.characters_per_line == (8 + 9 + 11 + 23) / 4
    assert measures.packed_percent == 100
    assert measures.conditionals_per_1000 == 250
    assert measures.comments_per_100 == 25
