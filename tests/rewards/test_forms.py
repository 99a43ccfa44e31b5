"""The form of responses: tags, patterns and JSON schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_ray.errors import DataError
from verl_ray.rewards.functions import Format, JsonSchema
from verl_ray.rewards.signatures import SignatureMistake

BOTH = ["think", "answer"]
SCHEMA = {"type": "object", "required": ["name"], "properties": {"n": {"minimum": 3}}}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>so\nit is</think><answer>4</answer>", 1.0),
        (" <think>so</think>\n\n<answer>\n4\n</answer>\n", 1.0),
        ("<think>2 < 3 and <b>4</b></think><answer>4</answer>", 1.0),
        ("<answer>4</answer><think>so</think>", 0.0),
        ("<think>so</think>", 0.0),
        ("<think>so</think> 4 <answer>4</answer>", 0.0),
        ("<think>so</think><answer>4</answer> Done.", 0.0),
        ("<think>so<think>so</think><answer>4</answer>", 0.0),
        ("<think>so</think><answer>3</answer><answer>4</answer>", 0.0),
        ("<think> </think><answer>4</answer>", 0.0),
        ("<think>so</think><answer>4", 0.0),
        ("", 0.0),
    ],
)
def test_tags(response: str, score: float) -> None:
    assert Format(tags=BOTH)(response) == score
    # The prompt may have ended with the first tag.
    rest = response.strip().removeprefix("<think>")
    assert Format(tags=BOTH, first_tag_in_prompt=True)(rest) == score


def test_a_pattern_matches_the_whole_response() -> None:
    form = Format(pattern="So .*: [0-9]+")
    assert form("So it\nis: 42\n") == 1.0
    assert form("Well. So it is: 42") == form("So it is: 42!") == 0.0


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({}, "a pattern or tags, one of the two"),
        ({"pattern": "x", "tags": BOTH}, "a pattern or tags, one of the two"),
        ({"pattern": "("}, "no regular expression: missing )"),
        ({"pattern": 3}, "no regular expression"),
        ({"tags": []}, "tags is []"),
        ({"tags": "think"}, "tags is 'think'"),
        ({"tags": ["<think>"]}, "tags is ['<think>']"),
        ({"tags": ["a", "a"]}, "a name twice"),
        ({"tags": BOTH, "first_tag_in_prompt": 1}, "first_tag_in_prompt is 1"),
        ({"pattern": "x", "first_tag_in_prompt": True}, "no effect on a pattern"),
    ],
)
def test_a_form_of_no_meaning_is_refused(arguments: Any, rule: str) -> None:
    with pytest.raises(SignatureMistake) as mistake:
        Format(**arguments)
    assert rule in mistake.value.rule


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ('{"name": "a", "n": 3}', 1.0),
        ('{"name": "a", "n": 2}', 0.0),
        ("{}", 0.0),
        ('Here:\n```json\n{"name": "a"}\n```\nDone.', 1.0),
        ('```\n{"name": "a"}\n```', 1.0),
        ('```json\n{"name": "a"}\n```\nNo:\n```json\n{}\n```', 0.0),
        ('Here: {"name": "a"}', 0.0),
        ('{"name": "a"', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_is_valid_under_a_schema(
    response: str, score: float, tmp_path: Path
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    assert JsonSchema(schema=SCHEMA)(response) == score
    assert JsonSchema(schema_path=str(path))(response, "another answer") == score
    # Without one, the answer of the record is the schema.
    assert JsonSchema()(response, json.dumps(SCHEMA)) == score


def test_not_a_number_is_no_json() -> None:
    form = JsonSchema(schema={"items": {"type": "number"}})
    assert form("[1.5]") == form("[-1e5]") == form("[]") == 1.0
    for name in ("NaN", "Infinity", "-Infinity"):
        assert form(f"[{name}]") == form(f"```json\n[{name}]\n```") == 0.0
        with pytest.raises(DataError, match=f"{name.strip('-')} is no JSON"):
            JsonSchema()("[]", f'{{"minimum": {name}}}')


ITEM = {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"$ref": "#/$defs/item"}, "$defs": {"item": ITEM}},
        {"items": {"$ref": "#item"}, "$defs": {"i": {"$anchor": "item", **ITEM}}},
        {"items": {"$ref": "#/own/item"}, "own": {"item": ITEM}},
        {"$id": "https://a/b", "items": {"$ref": "b#/$defs/i"}, "$defs": {"i": ITEM}},
        {"$id": "https://a/b", "items": {"$ref": "/c"}, "$defs": {"c": {"$id": "/c"} | ITEM}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": {"$ref": "#/definitions/item"},
            "definitions": {"item": ITEM},
        },
        {"items": {"anyOf": [ITEM, {"$ref": "#"}]}, "type": "array"},
    ],
)  # fmt: skip
def test_references_inside_of_a_schema_are_followed(schema: Any) -> None:
    for form, answer in (
        (JsonSchema(schema=schema), None),
        (JsonSchema(), json.dumps(schema)),
    ):
        assert form("[1, 2]", answer) == 1.0
        assert form('["a"]', answer) == 0.0


@pytest.mark.parametrize(
    ("schema", "rule"),
    [
        ({"items": {"$ref": "#/$defs/item"}}, "by its reference '#/$defs/item'"),
        ({"items": {"$ref": "#item"}}, "by its reference '#item'"),
        ({"items": {"$dynamicRef": "#item"}}, "by its reference '#item'"),
        ({"$ref": "https://a.invalid/b.json"}, "other documents are not fetched"),
        ({"$ref": "#/required/a", "required": ["a"]}, "reference '#/required/a'"),
        ({"$ref": "#/x", "x": {"$ref": "#/y"}}, "by its reference '#/y'"),
        ({"$ref": "#/x", "x": {"type": "objekt"}}, "'objekt' is not valid"),
        ({"$ref": "#/title", "title": "x"}, "'x' is not of type"),
        ({"$ref": "#"}, "in a circle"),
    ],
)
def test_a_reference_to_nothing_is_told_before_a_response(
    schema: Any, rule: str
) -> None:
    with pytest.raises(SignatureMistake) as mistake:
        JsonSchema(schema=schema)
    assert rule in mistake.value.rule
    # An empty response, as in the trial of all answers, is enough.
    with pytest.raises(DataError) as error:
        JsonSchema()("", json.dumps(schema))
    assert rule in str(error.value) and "so json_schema cannot grade" in str(
        error.value
    )


def test_an_answer_that_is_no_schema_is_refused() -> None:
    for answer in ('{"type": "objekt"}', "text", "[" * 100_000, None):
        with pytest.raises(DataError, match="schema"):
            JsonSchema()("{}", answer)


def test_a_schema_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("text")
    for arguments, rule in (
        ({"schema": {"type": "objekt"}}, "is no JSON schema: 'objekt' is not valid"),
        ({"schema": {"properties": {"n": {"minimum": "3"}}}}, "(at properties.n.min"),
        ({"schema_path": str(tmp_path / "absent.json")}, "No such file"),
        ({"schema_path": str(tmp_path / "text.json")}, "is no JSON: Expecting value"),
        ({"schema_path": 3}, "schema_path is 3"),
        ({"schema": SCHEMA, "schema_path": "x"}, "one of the two"),
    ):
        with pytest.raises(SignatureMistake) as mistake:
            JsonSchema(**arguments)  # type: ignore[arg-type]
        assert rule in mistake.value.rule
