"""Reward functions that judge the form of a response: `format` and `json_schema`.

Invariant: a score is 1.0 or 0.0. It says nothing about whether the response is right,
so its mean is no accuracy; it is usually one of several in `reward=mixed`. Deliberately
not here: the right answer.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.errors import DataError
from verl_ray.rewards.signatures import SignatureMistake

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_TAG = re.compile(r"[A-Za-z][\w-]*")
_FENCE = re.compile(r"^```(?:json)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class Format:
    """Whether a response has a form, given by a pattern or by tags."""

    def __init__(
        self,
        pattern: str | None = None,
        tags: Sequence[str] | None = None,
        first_tag_in_prompt: bool = False,
    ) -> None:
        """Take the form.

        Args:
            pattern: A regular expression that matches the whole response, where a dot
                stands for a line break, too.
            tags: Names of elements, such as think and answer: the response is
                `<think>...</think><answer>...</answer>`, with some text in each, each
                tag once, and nothing but white space around them.
            first_tag_in_prompt: Whether the prompt ends with the first tag, as chat
                templates of reasoning models do, so that no response has it.

        Raises:
            SignatureMistake: The arguments give no form, or two.
        """
        if (pattern is None) == (tags is None):
            rule = "it takes a pattern or tags, one of the two"
            raise SignatureMistake(rule, "Give tags: [think, answer], or a pattern.")
        if not isinstance(first_tag_in_prompt, bool):
            rule = f"its argument first_tag_in_prompt is {first_tag_in_prompt!r}"
            raise SignatureMistake(rule, "Use true or false.")

        if tags is not None:
            pattern = _pattern_of(tags, first_tag_in_prompt)
        elif first_tag_in_prompt:
            rule = "its argument first_tag_in_prompt has no effect on a pattern"
            raise SignatureMistake(rule, "Leave it out, or give tags.")
        try:
            self._pattern = re.compile(pattern or "", re.DOTALL)
        except (re.error, TypeError) as error:
            rule = f"its pattern is no regular expression: {error}"
            raise SignatureMistake(rule, "Correct it.") from error

    def __call__(self, response: str) -> float:
        """Return 1.0 when the response, but for white space around it, has the form."""
        return float(self._pattern.fullmatch(response.strip()) is not None)


def _pattern_of(tags: Sequence[str], first_tag_in_prompt: bool) -> str:
    """Return the pattern of elements one after the other."""
    is_list = isinstance(tags, list | tuple) and len(tags) > 0
    names = tags if is_list else ()
    if not names or not all(_TAG.fullmatch(str(name)) for name in names):
        rule = f"its argument tags is {tags!r}"
        raise SignatureMistake(rule, "Give a list of names, such as [think, answer].")
    if len(set(names)) < len(names):
        rule = f"its argument tags has a name twice: {', '.join(names)}"
        raise SignatureMistake(rule, "Give each tag once.")

    # No tag of the list stands inside of an element, nor is one blank.
    text = f"(?:(?!</?(?:{'|'.join(names)})>).)*"
    elements = [rf"<{name}>(?!\s*</{name}>){text}</{name}>" for name in names]
    pattern = r"\s*".join(elements)
    return pattern.removeprefix(f"<{names[0]}>") if first_tag_in_prompt else pattern


class JsonSchema:
    """Whether a response is JSON that is valid under a schema."""

    def __init__(self, schema: object = None, schema_path: str | None = None) -> None:
        """Take the schema; without one, the answer of each record is its schema.

        Args:
            schema: A JSON schema (json-schema.org) of any draft; 2020-12 unless its
                `$schema` names another. What its references name is in it.
            schema_path: The file that holds it.

        Raises:
            SignatureMistake: The file cannot be read, or there is no valid schema.
        """
        if schema is not None and schema_path is not None:
            rule = "it takes a schema or a schema_path, one of the two"
            raise SignatureMistake(rule, "Leave one out.")
        source = "schema"
        if schema_path is not None:
            source = "schema_path"
            schema = _read_schema(schema_path)

        self._validator = None
        if schema is not None:
            try:
                self._validator = _validator_of(schema)
            except _NoSchema as error:
                rule = f"its argument {source} is no JSON schema: {error}"
                raise SignatureMistake(rule, "Correct the schema.") from error
        # The responses to a prompt share their schema.
        self._of_answer = functools.lru_cache(maxsize=256)(_validator_of_answer)

    def __call__(self, response: str, answer: str | None = None) -> float:
        """Return 1.0 when the response is valid.

        The JSON is the whole response, or else the last fenced block of it (```json).
        Without any the score is 0.0. NaN and Infinity are no JSON.

        Raises:
            DataError: The schema is the record's answer, which is none.
        """
        validator = self._validator or self._of_answer(answer)
        fenced = _FENCE.findall(response)
        for text in (response, *fenced[-1:]):
            try:
                value = _json_of(text)
            # So deep that it cannot be read.
            except (ValueError, RecursionError):
                continue
            return float(validator.is_valid(value))
        return 0.0


def _read_schema(path: object) -> object:
    fix = "Give the path of a file with a JSON schema."
    if not isinstance(path, str):
        raise SignatureMistake(f"its argument schema_path is {path!r}", fix)
    try:
        return _json_of(Path(path).read_text("utf-8"))
    except OSError as error:
        rule = f"its schema cannot be read: {error.strerror} ({path})"
        raise SignatureMistake(rule, fix) from error
    except ValueError as error:
        raise SignatureMistake(f"{path} is no JSON: {error}", fix) from error


def _validator_of_answer(answer: str | None) -> Validator:
    if answer is None:
        raise DataError(
            "there is no answer to be the JSON schema, so json_schema needs an argument"
            " schema or schema_path"
        )
    try:
        return _validator_of(_json_of(answer))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"answer {answer[:80]!r} is no JSON schema ({error}), so json_schema cannot"
            " grade"
        ) from error


def _json_of(text: str) -> Any:
    """Return the value of a JSON text (RFC 8259), which has no NaN and no Infinity.

    Raises:
        ValueError: It is none.
        RecursionError: It is too deep.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


class _NoSchema(ValueError):
    """A value is no JSON schema; the text says why, and where."""


def _validator_of(schema: Any) -> Validator:
    """Return what validates values under a schema.

    Raises:
        _NoSchema: The value is none, or a reference in it leads nowhere.
    """
    # Imported here, since most scoring processes need none of it.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    kind = validator_for(schema, default=Draft202012Validator)
    _check_schema(kind, schema)
    _check_references(kind, schema)

    validator = kind(schema, registry=REGISTRY)
    try:
        validator.is_valid({})
    except RecursionError as error:
        raise _NoSchema("its references lead in a circle") from error
    return validator


def _check_schema(kind: type[Validator], schema: Any) -> None:
    """Check the keywords of a schema.

    Raises:
        _NoSchema: It is none.
    """
    from jsonschema.exceptions import SchemaError

    try:
        kind.check_schema(schema)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path))
        place = f" (at {where})" if where else ""
        raise _NoSchema(f"{error.message}{place}") from error


def _check_references(kind: type[Validator], schema: Any) -> None:
    """Look up all references of a schema, and check what they name.

    Raises:
        _NoSchema: There is nothing of that name, or it is no schema.
    """
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    dialect = str(kind.META_SCHEMA["$schema"])
    draft = specification_with(dialect, default=DRAFT202012)
    root = draft.create_resource(schema)
    remaining = [(root, REGISTRY.resolver_with_root(root))]
    seen: set[int] = set()
    # Takes each part of a schema once; ends when there is none left.
    while remaining:
        part, resolver = remaining.pop()
        if id(part.contents) in seen or not isinstance(part.contents, dict):
            continue
        seen.add(id(part.contents))

        for keyword in ("$ref", "$dynamicRef"):
            name = part.contents.get(keyword)
            if not isinstance(name, str):
                continue
            try:
                named = resolver.lookup(name)
            # A path through a list has numbers.
            except (Unresolvable, ValueError) as error:
                raise _NoSchema(
                    f"nothing in it is named by its reference {name!r}, and other"
                    " documents are not fetched"
                ) from error
            if name.startswith("#"):
                _check_schema(kind, named.contents)
            remaining.append((draft.create_resource(named.contents), named.resolver))
        below = map(draft.create_resource, draft.subresources_of(part.contents))
        remaining += [(each, resolver.in_subresource(each)) for each in below]
