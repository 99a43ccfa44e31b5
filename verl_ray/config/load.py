"""The one conversion between a plain tree of values and the typed configuration.

Invariant: past `parse` there is no dictionary of settings and no unknown key, and `parse(to_tree(c), type(c)) == c`.
Deliberately not here: where the tree comes from (the command line), which type a task has (`controllers/tasks.py`), and
rules over several fields (`rules`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from verl_ray.config.renamed import new_name
from verl_ray.config.schema import Config
from verl_ray.config.suggest import closest, did_you_mean, either
from verl_ray.errors import ConfigError, Problem

_NAMED = re.compile(r"^(reward\.components)\.[^.]+")  # the names of these sections are the user's
_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_SECTION_ERRORS = {"model_type", "model_attributes_type", "dict_type"}

C = TypeVar("C", bound=Config)


def parse(tree: Mapping[str, object], kind: type[C]) -> C:
    """Turn a tree of plain values (as YAML or JSON gives them) into the typed configuration of a task.

    Raises ConfigError with every problem at once: unknown and missing keys, wrong types, values out of range.
    Rules over several fields are `rules.broken`.
    """
    try:
        return kind.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise ConfigError(_problems(error.errors(include_url=False), tree, kind)) from None
    except TypeError as error:
        raise ConfigError([Problem("(the tree)", type(tree).__name__, str(error), "Use plain values only.")]) from None


def to_tree(config: Config) -> dict[str, object]:
    """The configuration as plain values (dict, list, str, int, float, bool, None), for config.yaml and trackers."""
    tree: dict[str, object] = config.model_dump(mode="json")
    return tree


def known_keys(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that `kind` can hold, over all choices (`actor.backend.shard_size` included)."""
    return (key for key, _ in _fields(kind, prefix))


def _fields(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in kind.model_fields.items():
        key = f"{prefix}{name}"
        yield key, field
        for section in _sections(field.annotation):
            yield from _fields(section, f"{key}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _sections(argument)


def _problems(errors: list[ErrorDetails], tree: Mapping[str, object], kind: type[BaseModel]) -> list[Problem]:
    """One Problem per key: pydantic reports one error per member of a union, which are alternatives of one rule."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        by_key.setdefault(_key(error, tree), []).append(error)
    outer = {key for key in by_key if any(other.startswith(f"{key}.") for other in by_key)}  # what is inside says more
    return [_problem(key, alternatives, kind) for key, alternatives in by_key.items() if key not in outer]


def _key(error: ErrorDetails, tree: Mapping[str, object]) -> str:
    """The dotted key of an error. A location also names members of unions, which are no part of the tree, and the
    positions that a list lacks, where the list itself is what is wrong."""
    node: object = tree
    parts: list[str] = []
    for position, part in enumerate(error["loc"]):
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list):
            if error["type"] == "missing":
                break
            node = node[int(part)]
        elif not (error["type"] == "missing" and position == len(error["loc"]) - 1):
            continue
        parts.append(str(part))
    return ".".join(parts)


def _problem(key: str, alternatives: list[ErrorDetails], kind: type[BaseModel]) -> Problem:
    first = alternatives[0]
    if first["type"] in ("missing", "too_long") and isinstance(first["input"], list):
        return Problem(key, first["input"], "this list has the wrong length", f"Use {_list(key, kind)}.")
    if first["type"] == "missing":
        return Problem(key, None, "this key has no value", "Set it; the YAML holds every value.")
    if first["type"] in _SECTION_ERRORS:
        return Problem(key, first["input"], "this is a section of keys, not a value", _set_inside(key, first, kind))
    if first["type"] == "extra_forbidden":
        fix = new_name(key) or did_you_mean(key, _without_prefixes(kind), "key")
        return Problem(key, first["input"], "no such key", fix)
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return Problem(f"{key}.kind", first["input"], "no such choice", f"Use {first['ctx']['expected_tags']}.")
    fixes = dict.fromkeys(_list(key, kind) if error["type"] == "tuple_type" else _fix(error) for error in alternatives)
    near = [name for error in alternatives for name in closest(str(first["input"]), _choices(error))]
    hint = f"Did you mean {either(near)}? " if near else ""
    return Problem(key, first["input"], _rule(first["input"], alternatives), f"{hint}Use {either(fixes)}.")


def _list(key: str, kind: type[BaseModel]) -> str:
    """What the list at `key` holds, with an example of it."""
    field = _field(key, kind)
    items = get_args(field.annotation)
    size = "" if Ellipsis in items else f" of {len(items)} numbers"
    return f"a list{size}, e.g. {either(field.examples or [])}"


def _set_inside(key: str, error: ErrorDetails, kind: type[BaseModel]) -> str:
    """How to set what is inside the section at `key`."""
    example = _field(key, kind).examples
    key = _NAMED.sub(r"\1", key)
    if example:
        return f"Use a section, e.g. '{key}={either(example)}'."
    inside = [name for name in _without_prefixes(kind) if name.startswith(f"{key}.") and not name.endswith(".kind")]
    if isinstance(error["input"], str) and f"{key}.path" in inside:
        return f"Did you mean {key}.path={error['input']}?"
    return f"Set the keys inside it, e.g. {inside[0]}=..."


def _field(key: str, kind: type[BaseModel]) -> FieldInfo:
    return dict(_fields(kind))[_NAMED.sub(r"\1", key)]


def _rule(found: object, alternatives: list[ErrorDetails]) -> str:
    if any(error["type"] == "finite_number" for error in alternatives):
        return "this is not a finite number"
    if any(error["type"] in _BOUNDS for error in alternatives):
        return "this number is out of range"
    if any(error["type"] == "literal_error" for error in alternatives) and isinstance(found, str):
        return "there is no such choice"
    return f"this is the wrong type ({type(found).__name__})"


def _choices(error: ErrorDetails) -> list[str]:
    expected = str(error.get("ctx", {}).get("expected", ""))
    return re.findall(r"'([^']+)'", expected)


def _without_prefixes(kind: type[BaseModel]) -> list[str]:
    """The keys that hold a value, not those that only group others."""
    keys = list(known_keys(kind))
    groups = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in groups]


def _fix(error: ErrorDetails) -> str:
    """What would be right instead, with the nearest value where the rule is a bound."""
    context = error.get("ctx", {})
    match error["type"]:
        case "greater_than":
            whole = isinstance(error["input"], int)
            nearest = f"; the nearest is {context['gt'] + 1}" if whole else ""
            return f"a number above {context['gt']}{nearest}"
        case "greater_than_equal":
            return f"a number of at least {context['ge']}"
        case "less_than_equal":
            return f"a number of at most {context['le']}"
        case "literal_error":
            return either(_choices(error))
        case "int_type" | "int_from_float" | "int_parsing":
            found = error["input"]
            whole = isinstance(found, float) and found.is_integer()
            return f"the whole number {found:.0f}" if whole else "a whole number"
        case "float_type" | "float_parsing" | "finite_number":
            return "a finite number"
        case "bool_type" | "bool_parsing":
            return "true or false"
        case "string_type":
            return "a text"
        case "dict_type":
            return "a section of keys"
        case "none_required":
            return "null"
        case _:
            return error["msg"].removeprefix("Input should be ").lower()
