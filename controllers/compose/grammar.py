"""Overrides in Hydra's grammar: typed, with several values, and made of Python values.

Invariant: all overrides that cannot be read are reported at once, before Hydra sees
them. The runs of a sweep (`key=1,2,3`) are all combinations, and the last override
varies fastest. An override that was made of a Python value is read back as that value.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from controllers.compose.sources import options_of
from controllers.compose.trees import TABLES
from verl_ray.errors import ConfigError, Problem
from verl_ray.shell import as_quoted, for_shell, in_grammar

# `~` as the whole first part of a path, where a value begins.
_HOME = re.compile(r"(?<=[=:,\[ ])~(?=[/,\]} ]|$)")


def parsed_override(text: str) -> Override:
    """Return an override as Hydra reads it; a path may begin with `~` without quotes.

    Raises:
        HydraException: it cannot be read.
    """
    parser = OverridesParser.create()
    try:
        return parser.parse_override(text)
    except HydraException:
        # Hydra's grammar knows no such character. A path has another word for it.
        without_tilde = _HOME.sub("$HOME", text)
        if without_tilde == text:
            raise
        return parser.parse_override(without_tilde)


def key_of(override: Override) -> str:
    """Return what stands before the `=`, such as `backend@critic.backend`."""
    group = str(override.key_or_group)
    if override.package is None:
        return group
    return f"{group}@{override.package}"


def parse_overrides(
    overrides: Sequence[str], problems: list[Problem]
) -> list[Override]:
    """Return the overrides that can be understood; the others become problems."""
    parsed = []

    for text in overrides:
        try:
            override = parsed_override(text)
        except HydraException:
            problems.append(_unreadable(text))
            continue

        if override.is_sweep_override():
            problems.append(_sweep(override, text))
        elif override.key_or_group == "":
            rule = "an override needs a key"
            problems.append(Problem(text, text, rule, "Write key=value."))
        else:
            parsed.append(override)

    return parsed


_KEY = re.compile(r"[+~]{0,2}[\w./:@-]+", re.ASCII)


def _unreadable(text: str) -> Problem:
    key, equals, value = text.partition("=")
    if not key:
        return Problem(text, text, "an override needs a key", "Write key=value.")
    if not equals:
        rule = "this override has no value"
        return Problem(key, text, rule, _root_named_by(text) or f"Write {key}=VALUE.")

    table, _, source = key.rpartition(".functions.")
    if table and "/" in source:
        # The grammar has no keys with a slash, but names in a dict.
        rule = "this key cannot be read"
        functions = f"{{{source}: {in_grammar(value)}, default: by_data_source}}"
        typed = f"{table}.functions={functions}"
        fix = f"Write {for_shell([typed])}."
        if not _is_readable(typed):
            # Names in a dict have ASCII letters, too.
            fix = f"Write {table}.functions in a YAML file, and --config-name its path."
        return Problem(key, value, rule, fix)
    if not _KEY.fullmatch(key):
        rule = "this key cannot be read"
        return Problem(key, value, rule, "Keys have ASCII letters; correct it.")

    rule = "this value cannot be read"
    if value and value[0] not in "[{":
        readable = for_shell([(key, value)])
        fix = f"Quote a text for the shell and once more: {readable}."
        return Problem(key, value, rule, fix)

    fix = f"Quote lists and dicts as a whole for the shell: '{key}=[1, 2]'."
    readable = f"{key}={_with_quoted_texts(value)}"
    if _is_readable(readable):
        typed = for_shell([readable])
        fix = f"Quote the texts in it, and the whole for the shell: {typed}."
    return Problem(key, value, rule, fix)


_NO_BARE_TEXT = r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\s*(?:[\[\]{},]|: )\s*)"""


def _with_quoted_texts(value: str) -> str:
    """Return a list or a dict with quotes around each text that cannot be read."""
    # The odd ones stand between texts, or have quotes already.
    parts = re.split(_NO_BARE_TEXT, value)
    for index in range(0, len(parts), 2):
        text = parts[index]
        if text and not _is_readable(f"key={text}"):
            parts[index] = as_quoted(text)
    return "".join(parts)


def _is_readable(text: str) -> bool:
    try:
        parsed_override(text)
    except HydraException:
        return False
    return True


def _root_named_by(text: str) -> str | None:
    """Return how to name a root config that stands by itself; None if it is none."""
    name = text.removesuffix(".yaml")
    if name in options_of(""):
        return f"Write --config-name {name}."
    path = Path(text)
    if (path / "config.yaml").is_file():
        words = for_shell(["--config-dir", text, "--config-name", "config"])
        return f"Write {words}."
    if path.suffix == ".yaml":
        return f"Write {for_shell(['--config-name', text])}."
    return None


def _sweep(override: Override, text: str) -> Problem:
    _, _, value = text.partition("=")
    rule = "several values are a sweep, and this is one run"
    fix = (
        f"Give one value, or --multirun for a run with each; a list is written"
        f" '{override.key_or_group}=[...]'."
    )
    return Problem(key_of(override), value, rule, fix)


# ------------------------------------------------------------------------------- sweeps


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """Every override of the run, in the order in which they were typed."""
    own: tuple[str, ...]
    """The overrides that set it apart from the other runs."""


def swept_runs(overrides: Sequence[str]) -> list[SweptRun]:
    """Return the runs of a sweep: a single one if no override has several values.

    Raises:
        ConfigError: the values of an override cannot be listed.
    """
    problems: list[Problem] = []
    alternatives = [_alternatives(text, problems) for text in overrides]
    if problems:
        raise ConfigError(problems)

    runs = []
    for combination in itertools.product(*alternatives):
        own = [
            text
            for text, values in zip(combination, alternatives, strict=True)
            if len(values) > 1
        ]
        runs.append(SweptRun(combination, tuple(own)))

    return runs


def _alternatives(text: str, problems: list[Problem]) -> list[str]:
    """Return an override as it is typed for each of its values."""
    try:
        override = parsed_override(text)
    except HydraException:
        # What cannot be read is reported when each run is checked.
        return [text]

    if not override.is_sweep_override():
        return [text]

    key = override.get_key_element()
    try:
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException:
        rule = "the values of this sweep cannot be listed"
        fix = f"Write them: {key}=1,2,3 or {key}=range(1,4)."
        problems.append(Problem(key, text.partition("=")[2], rule, fix))
        return [text]


# ------------------------------------------------------------------------ Python values

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
