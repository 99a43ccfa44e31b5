"""Python values as overrides in Hydra's grammar.

Invariant: an override is read back as the value that it was made of. Deliberately not
here: which keys there are, and what an override does (`overrides.py`, `choices.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from controllers.compose.trees import TABLES
from verl_ray.errors import ConfigError, Problem
from verl_ray.shell import as_quoted

# Names that a dotted key can be made of; others stay inside of a dict.
_NAME = re.compile(r"[A-Za-z_][\w@]*(\.[A-Za-z_][\w@]*)*")
# Names inside of a dict, which the grammar does not let anyone quote.
_NAME_IN_DICT = re.compile(r"[\w/@.-]+( [\w/@.-]+)*")


def overrides_of(values: Mapping[str, object]) -> list[str]:
    """Return an override per value, or per value of a nested section.

    Args:
        values: value by key. `{"actor.num_ranks": 2}` and `{"actor": {"num_ranks": 2}}`
            are the same. A text chooses from a group, as `{"reward": "judge"}` does.

    Raises:
        ConfigError: a value is none that YAML has, or a key is no text.
    """
    return [f"{key}={_text(key, value)}" for key, value in _leaves(values, "")]


def keys_of(values: Mapping[str, object]) -> list[str]:
    """Return the dotted key of each override that `overrides_of` makes."""
    return [key for key, _ in _leaves(values, "")]


def _leaves(section: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    """Yield dotted keys with their values; a section is taken apart where possible."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            rule = "this is no key of a setting"
            raise ConfigError([Problem(key, value, rule, "Write a key as in YAML.")])

        is_table = TABLES.fullmatch(key) is not None
        if isinstance(value, Mapping) and not is_table and _is_section(value):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _is_section(values: Mapping[object, object]) -> bool:
    """Return whether a dict can be taken apart; an empty one is a value."""
    return bool(values) and all(_NAME.fullmatch(str(name)) for name in values)


def _text(key: str, value: object) -> str:
    """Return a value in the grammar."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return as_quoted(str(value))

    if isinstance(value, Mapping):
        entries = [f"{_name(key, name)}: {_text(key, value[name])}" for name in value]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return "[" + ", ".join(_text(key, entry) for entry in value) + "]"

    rule = f"this is a {type(value).__name__}"
    fix = "Give None, a number, a text, a path, or a list or dict of these."
    raise ConfigError([Problem(key, repr(value), rule, fix)])


def _name(key: str, name: object) -> str:
    """Return a name inside of a dict."""
    if isinstance(name, str) and _NAME_IN_DICT.fullmatch(name):
        return name
    rule = "a key in it has characters that an override cannot have"
    fix = "Use letters, digits, blanks, and / @ . _ -, or a YAML file (config_dir)."
    raise ConfigError([Problem(key, name, rule, fix)])
