"""The conversion between a plain tree of values and the typed configuration.

Invariant: past `parse` there is no dictionary of settings and no unknown key, and
`parse(to_tree(c), type(c)) == c`. Deliberately not here: where the tree comes from (the
command line), which type a task has (`controllers/tasks.py`), rules over several fields
(`rules`), and how errors of pydantic become problems (`field_problems.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from verl_ray.config.field_problems import field_problems
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem

C = TypeVar("C", bound=Config)

Changes = Mapping[str, object]
"""Values by dotted key."""


def parse(tree: Mapping[str, object], kind: type[C]) -> C:
    """Turn a tree of plain values into the typed configuration of a task.

    Rules over several fields are not checked here (`rules.rule_violations`).

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
