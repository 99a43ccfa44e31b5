"""The conversion between a plain tree of values and the typed configuration.

Invariant: past `parse` there is no dictionary of settings and no unknown key, and
`parse(to_tree(c), type(c)) == c`. Every problem of a field names the key as the user
writes it, the value, the rule that it breaks, and what would be right. Keys follow from
the fields, over every choice of a union.

The record of what each `auto` became (run.resolved) is a part of the configuration, so
config.yaml and every checkpoint hold it. Only a value that is still the recorded one
counts as chosen by a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar, get_args

from annotated_types import Ge
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from verl_ray.config.advice import advice_on, foreign_choice
from verl_ray.config.paths import UNKNOWN_PART
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem
from verl_ray.settings.section import read_never
from verl_ray.shell import for_shell
from verl_ray.suggest import closest, either

# ---------------------------------------------------------------------- trees and types

C = TypeVar("C", bound=Config)

Changes = Mapping[str, object]
"""Values by dotted key."""


def parse(tree: Mapping[str, object], kind: type[C]) -> C:
    """Turn a tree of plain values into the typed configuration of a task.

    Rules over several fields are not checked here (`schema.rule_violations`).

    Args:
        tree: values as YAML or JSON gives them.
        kind: the type of the task's configuration.

    Raises:
        ConfigError: every problem at once, which are unknown and missing keys, wrong
            types, and values out of range.
    """
    # Validation of JSON is strict and still takes a list where the type is a tuple.
    try:
        return kind.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = field_problems(details, tree, kind)
    except TypeError as error:
        # json.dumps refuses anything but plain values.
        value = type(tree).__name__
        fix = "Use plain values only."
        problems = [Problem("(the tree)", value, str(error), fix)]

    raise ConfigError(problems)


def to_tree(config: Config) -> dict[str, object]:
    """Return the configuration as plain values, for config.yaml and trackers.

    Plain values are dict, list, str, int, float, bool and None.
    """
    tree: dict[str, object] = config.model_dump(mode="json")
    return tree


def with_changes(config: C, changes: Changes) -> C:
    """Return the configuration with other values, which must be of the right types."""
    for key, value in changes.items():
        config = _with_value(config, key.split("."), value)
    return config


def _with_value(node: Any, path: Sequence[str], value: object) -> Any:
    """Return a section, or a dictionary of sections, with another value."""
    name, *rest = path
    if isinstance(node, Mapping):
        return {**node, name: _with_value(node[name], rest, value) if rest else value}
    if rest:
        value = _with_value(getattr(node, name), rest, value)
    # Sections that stay are instances already, which are not validated again.
    return type(node).model_validate({**dict(node), name: value})


# --------------------------------------------------------------------------------- keys


def known_keys(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that `kind` can hold.

    Keys of all choices are included, such as `actor.backend.shard_size`.
    """
    for key, _ in known_fields(kind, prefix):
        yield key


def known_fields(
    kind: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key that `kind` can hold, with its field."""
    for name, field in kind.model_fields.items():
        # The key of a section comes first: a message may be about the whole of it.
        key = f"{prefix}{name}"
        yield key, field

        for section in _sections(field.annotation):
            yield from known_fields(section, f"{key}.")


def value_keys(kind: type[BaseModel]) -> list[str]:
    """Return the keys that hold a value, without those that only group others."""
    keys = list(known_keys(kind))
    groups = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in groups]


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the section types inside an annotation, such as the choices of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return

    # The arguments of unions and of annotated types may be sections.
    for argument in get_args(annotation):
        yield from _sections(argument)


# ------------------------------------------------------------------- problems of fields

# The names of these sections are the user's own, so no field is declared for them. A
# teacher may also be a section by itself.
_NAMED_SECTIONS = re.compile(
    r"^(reward\.components|agent\.models|distill\.teacher(?=\.[^.]+\.))\.[^.]+"
)

_ITEM_NUMBER = re.compile(r"\.\d+(?=\.)")

_BOUND_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_SECTION_ERRORS = {"model_type", "model_attributes_type", "dict_type"}
_LENGTH_ERRORS = {"missing", "too_long"}
_CHOICE_ERRORS = {"union_tag_invalid", "union_tag_not_found"}


def field_problems(
    errors: Sequence[ErrorDetails], tree: Mapping[str, object], kind: type[BaseModel]
) -> list[Problem]:
    """Return one problem per key.

    Args:
        errors: the errors of one validation.
        tree: the plain values that were validated.
        kind: the type of the configuration.
    """
    # Pydantic reports one error per member of a union; they are alternatives to one
    # value, so they belong to one problem.
    by_key: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        key = _key(error, tree)
        by_key.setdefault(key, []).append(error)

    return [
        _problem(key, alternatives, kind)
        for key, alternatives in by_key.items()
        if not _has_inner_error(key, by_key)
    ]


def _as_named(key: str, known: Sequence[str]) -> list[str]:
    """Return known keys, those of a table of sections in the section of this key."""
    named = _NAMED_SECTIONS.match(key)
    if named is None:
        return list(known)
    return [re.sub(rf"^{named[1]}(?=\.)", named[0], each) for each in known]


def _has_inner_error(key: str, by_key: Mapping[str, object]) -> bool:
    """Return whether another error is inside the section at `key`, and more precise."""
    return any(other.startswith(f"{key}.") for other in by_key)


def _key(error: ErrorDetails, tree: Mapping[str, object]) -> str:
    """Return the dotted key of an error.

    Pydantic's location also names members of unions, which are no part of the tree. It
    also names positions that a list lacks, where the list itself is what is wrong.
    """
    node: object = tree
    parts: list[str] = []
    location = error["loc"]
    is_missing = error["type"] == "missing"

    for position, part in enumerate(location):
        is_last = position == len(location) - 1

        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list):
            if is_missing:
                break
            if not isinstance(part, int):
                # The list is no member of the union that this is a part of.
                continue
            node = node[part]
        elif not (is_missing and is_last):
            # A member of a union, such as the name of a class.
            continue

        parts.append(str(part))

    return ".".join(parts)


def _problem(
    key: str, alternatives: Sequence[ErrorDetails], kind: type[BaseModel]
) -> Problem:
    """Return the problem of one key, from the errors of each type it might have had."""
    first = alternatives[0]
    error_type = first["type"]
    value = first["input"]

    # A list that is too short has "missing" entries, so it is looked at first.
    if error_type in _LENGTH_ERRORS and isinstance(value, list):
        expected = _expected_list(key, kind)
        return Problem(key, value, "this list has the wrong length", f"Use {expected}.")

    if error_type == UNKNOWN_PART:
        return Problem(key, value, first["ctx"]["rule"], first["ctx"]["fix"])

    if error_type == "missing":
        fix = "Set it; the YAML holds every value."
        if _NAMED_SECTIONS.match(key):
            # An entry of a table of the user's own has no YAML.
            fix = f"Set it: {key}=..."
        return Problem(key, None, "this key has no value", fix)

    if error_type in _SECTION_ERRORS:
        rule = "this is a section of keys, not a value"
        return Problem(key, value, rule, _how_to_set_section(key, value, kind))

    if error_type == "extra_forbidden":
        known = _as_named(key, value_keys(kind))
        section = key.rpartition(".")[0]
        if key in known:
            rule = f"the {section} that was chosen has no such setting"
            return Problem(
                key, value, rule, f"Leave it out, or choose another {section}."
            )
        # An item of a list is numbered, and all items have the same keys.
        unnumbered = _ITEM_NUMBER.sub("", key)
        return Problem(key, value, "no such key", advice_on(unnumbered, known))

    if error_type in _CHOICE_ERRORS:
        # A section without a kind comes without the list of kinds.
        tags = first["ctx"].get("expected_tags")
        rule = "no such choice" if tags else "this section does not say its kind"
        fix = f"Use {tags}." if tags else f"Set {key}.kind."
        return Problem(f"{key}.kind", value, rule, fix)

    return _bad_value(key, alternatives, kind)


def _bad_value(
    key: str, alternatives: Sequence[ErrorDetails], kind: type[BaseModel]
) -> Problem:
    """Return the problem of a value of the wrong type or out of range."""
    value = alternatives[0]["input"]
    expected: list[str] = []
    near: list[str] = []

    for error in alternatives:
        if error["type"] == "tuple_type":
            expected.append(_expected_list(key, kind))
        else:
            expected.append(_expected_value(error))

        near += closest(str(value), _choices(error))

    field = _field(key, kind)
    # Some settings are off where they are 0, others where they are null.
    if value is None and _least(field) == 0:
        expected = [f"{text} of at least 0" for text in expected]
    if value == 0 and NoneType in get_args(field.annotation):
        expected.insert(0, "null")
    if any(getattr(note, "func", None) is read_never for note in _notes(field)):
        expected.insert(0, "0 for never")

    hint = f"Did you mean {either(near)}? " if near else ""
    meant = foreign_choice(".".join(key.split(".")[-2:]), str(value))
    if meant is not None:
        hint = f"{meant} "

    # Members of a union may expect the same.
    distinct = dict.fromkeys(expected)
    fix = f"{hint}Use {either(distinct)}."
    return Problem(key, value, _broken_rule(value, alternatives), fix)


def _broken_rule(value: object, alternatives: Sequence[ErrorDetails]) -> str:
    """Return what is wrong with a value that fits none of the alternatives."""
    error_types = {error["type"] for error in alternatives}

    if "finite_number" in error_types:
        return "this is not a finite number"
    if "too_short" in error_types:
        return "this list is empty"
    if "string_too_short" in error_types:
        return "this text is empty"
    if error_types & _BOUND_ERRORS:
        return "this number is out of range"
    if "literal_error" in error_types and isinstance(value, str):
        return "there is no such choice"
    return f"this is the wrong type ({type(value).__name__})"


# ------------------------------------------------------------------ what would be right


def _expected_list(key: str, kind: type[BaseModel]) -> str:
    """Return what the list at `key` holds, with an example of it."""
    examples = either(_examples(key, kind))
    if _NAMED_SECTIONS.sub(r"\1", key) not in dict(known_fields(kind)):
        # An entry under a name that the user chose.
        return f"lists as in {examples}"

    items = get_args(_field(key, kind).annotation)
    is_open = Ellipsis in items
    size = "" if is_open else f" of {len(items)} numbers"
    return f"a list{size}, e.g. {examples}"


def _how_to_set_section(key: str, value: object, kind: type[BaseModel]) -> str:
    """Return how to set what is inside the section at `key`."""
    examples = _examples(key, kind)
    key = _NAMED_SECTIONS.sub(r"\1", key)
    if examples:
        return f"Use a section, e.g. '{key}={either(examples)}'."

    inner_keys = [
        name
        for name in value_keys(kind)
        if name.startswith(f"{key}.") and not name.endswith(".kind")
    ]

    # A text in place of a model's section is most likely the model's path.
    if isinstance(value, str) and f"{key}.path" in inner_keys:
        return f"Did you mean {for_shell([(f'{key}.path', value)])}?"
    if not inner_keys:
        return f"Use a section, e.g. '{key}={{name: value}}'."
    return f"Set the keys inside it, e.g. {inner_keys[0]}=..."


def _expected_value(error: ErrorDetails) -> str:
    """Return what would be right, with the nearest value where the rule is a bound."""
    context = error.get("ctx", {})
    value = error["input"]

    match error["type"]:
        case "greater_than":
            bound = context["gt"]
            nearest = f"; the nearest is {bound + 1}" if isinstance(value, int) else ""
            return f"a number above {bound}{nearest}"
        case "greater_than_equal":
            return f"a number of at least {context['ge']}"
        case "less_than_equal":
            return f"a number of at most {context['le']}"
        case "literal_error":
            return either(_choices(error))
        case "int_type" | "int_from_float" | "int_parsing":
            if isinstance(value, float) and value.is_integer():
                return f"the whole number {value:.0f}"
            return "a whole number"
        case "float_type" | "float_parsing" | "finite_number":
            return "a finite number"
        case "bool_type" | "bool_parsing":
            return "true or false"
        case "string_type":
            return "a text"
        case "string_too_short":
            return "a text that is not empty"
        case "dict_type" | "model_type" | "model_attributes_type":
            return "a section of keys"
        case "list_type":
            return "a list"
        case "too_short":
            return "a list that is not empty"
        case "none_required":
            return "null"
        case _:
            # Pydantic's own words, for the types that no field has so far.
            return error["msg"].removeprefix("Input should be ").lower()


def _choices(error: ErrorDetails) -> list[str]:
    """Return the names that pydantic lists as allowed, if it lists any."""
    context = error.get("ctx", {})
    expected = str(context.get("expected", ""))
    return re.findall(r"'([^']+)'", expected)


def _examples(key: str, kind: type[BaseModel]) -> list[object]:
    """Return the examples of the field at a dotted key; empty if it has none.

    Where the field may also be null, they stand with the other type.
    """
    field = _field(key, kind)
    if field.examples:
        return list(field.examples)

    for member in get_args(field.annotation):
        for note in getattr(member, "__metadata__", ()):
            if isinstance(note, FieldInfo) and note.examples:
                return list(note.examples)

    return []


def _least(field: FieldInfo) -> object:
    """Return the least number that a field takes; None where nothing says so."""
    return next((note.ge for note in _notes(field) if isinstance(note, Ge)), None)


def _notes(field: FieldInfo) -> list[Any]:
    """Return the annotations of a field, and of the members of its union."""
    notes = list(field.metadata)
    for member in get_args(field.annotation):
        for note in getattr(member, "__metadata__", ()):
            notes += note.metadata if isinstance(note, FieldInfo) else [note]
    return notes


def _field(key: str, kind: type[BaseModel]) -> FieldInfo:
    """Return the field at a dotted key, or the one whose value the key is inside of."""
    fields = dict(known_fields(kind))
    name = _NAMED_SECTIONS.sub(r"\1", key)
    while name not in fields:
        name = name.rpartition(".")[0]
    return fields[name]


# -------------------------------------------------- the record of what each auto became

RECORD = "run.resolved"

_ABSENT = object()


def with_record(config: C, values: Mapping[str, object], *, on_gpus: bool) -> C:
    """Return a configuration that records what was resolved, now or before.

    Args:
        config: Resolved configuration.
        values: What has been resolved now, by key.
        on_gpus: Whether it was resolved for GPUs.
    """
    record = config.run.resolved.model_dump()
    for key, value in values.items():
        for recorded in record.values():
            recorded.pop(key, None)
        record["gpu" if on_gpus else "cpu"][key] = value
    return with_changes(config, {RECORD: record})


def with_auto_again(config: C) -> C:
    """Return a configuration with `auto` again wherever a run has resolved it.

    It serves for other processes or another machine. A value that the user has set
    stays, and so does one that differs from what the run resolved.
    """
    record = config.run.resolved
    chosen = _still_there({**record.cpu, **record.gpu}, config)
    nothing: dict[str, object] = {RECORD: {"cpu": {}, "gpu": {}}}
    return with_changes(config, nothing | dict.fromkeys(chosen, "auto"))


def resolved_elsewhere(config: Config, *, on_gpus: bool) -> dict[str, object]:
    """Return the settings, by key, that a run has resolved on another kind of device.

    Args:
        config: Configuration of a run, which keeps these values.
        on_gpus: Whether this machine has GPUs.
    """
    record = config.run.resolved
    return _still_there(record.cpu if on_gpus else record.gpu, config)


def _still_there(values: Mapping[str, object], config: Config) -> dict[str, object]:
    """Return those of the values that the configuration has at their keys."""
    tree = to_tree(config)
    return {key: value for key, value in values.items() if _at(tree, key) == value}


def _at(tree: Any, key: str) -> object:
    """Return the value of a dotted key; what equals no value where there is no such."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return _ABSENT
        tree = tree[part]
    return tree
