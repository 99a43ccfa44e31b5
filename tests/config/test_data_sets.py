"""Paths of data sets: a text, an entry, or a list of both."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.data.test_prompts import config
from verl_ray.config.data import DataSet, in_words


def test_every_form_is_a_tuple_of_data_sets() -> None:
    entry = {"path": "/a.parquet", "weight": 2.0}
    forms: list[tuple[Any, tuple[DataSet, ...]]] = [
        ("/a.jsonl", (DataSet("/a.jsonl"),)),
        (entry, (DataSet("/a.parquet", weight=2.0),)),
        ([entry, "/b.jsonl"], (DataSet("/a.parquet", 2.0), DataSet("/b.jsonl"))),
    ]
    for value, expected in forms:
        assert config(train_path=value).train_sets == expected
        assert config(validation_path=value).validation_sets == expected
    assert config(validation_path=None).validation_sets == ()
    assert in_words(forms[2][1]) == "/a.parquet, /b.jsonl"

    on_the_hub = {"path": "o/n", "subset": "main", "split": "train", "revision": "1a2b"}
    assert config(train_path=on_the_hub).train_sets == (
        DataSet("o/n", subset="main", split="train", revision="1a2b"),
    )


@pytest.mark.parametrize(
    "value", [[], 5, {"weight": 2.0}, {"path": "a", "weight": 0.0}, [["a"]]]
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        config(train_path=value)
