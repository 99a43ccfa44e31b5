"""Tests of errors as texts, and of their way between processes."""

import pickle
from pathlib import Path

import pytest

from verl_ray.errors import DataError, HubError, InputError, OverlongRows

FULL = DataError("found 3", expected="a text", fix="correct it", place="/a, line 2")
SENTENCE = DataError("holds nothing", fix="Add a file", subject=Path("/a"))


def test_the_parts_of_an_error_make_its_message() -> None:
    assert str(DataError("found 3")) == "found 3"
    assert str(FULL) == "/a, line 2: found 3, expected a text; correct it"
    assert FULL.remedy == "expected a text; correct it"
    assert str(SENTENCE) == "/a holds nothing. Add a file"
    assert SENTENCE.remedy == "Add a file"
    assert str(DataError("found 3", expected="a text", fix="Or stop")) == (
        "found 3, expected a text. Or stop"
    )


def test_a_place_is_left_out_where_it_is_known() -> None:
    assert FULL.rule_in("/a") == "line 2: found 3"
    assert SENTENCE.rule_in("/a") == "holds nothing"
    assert SENTENCE.rule_in("/b") == "/a holds nothing"
    assert FULL.is_about("/a") and SENTENCE.is_about("/a")
    assert not FULL.is_about("/b") and not DataError("found 3").is_about("/a")


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        SENTENCE,
        OverlongRows("2 rows are too long", "data.max", 4, 7, ", or skip them"),
        HubError("an/id", "it has no such commit", "Take another.", True),
    ],
)
def test_the_parts_of_an_error_survive_pickling(error: InputError) -> None:
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
