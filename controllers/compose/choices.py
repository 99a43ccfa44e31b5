"""Choices from groups (`backend=fsdp`), which make the tree that values are set in.

Invariant: overrides are parsed before Hydra sees them, so that all bad ones are
reported at once. Deliberately not here: overrides that set a value (`overrides.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from controllers.compose.sources import options_of, run_hydra
from controllers.compose.sweeps import parsed_override
from verl_ray.config.foreign_choices import foreign_choice
from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import Problem
from verl_ray.shell import as_quoted, for_shell, in_grammar

# The choice that stands for the backend of all roles, where Hydra cannot refer to it.
_SHARED = "_shared"


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
    return Problem(_key(override), value, rule, fix)


def choose(
    config_name: str,
    parsed: list[Override],
    problems: list[Problem],
    *,
    config_dir: str | None,
) -> tuple[DictConfig, dict[str, str], list[Override]]:
    """Make all choices from groups.

    Args:
        config_name: the root config.
        parsed: all overrides.
        problems: where choices that do not exist are added.
        config_dir: a folder of the user's own, or None.

    Returns:
        The tree under the choices, the choice of every group by the key that overrides
        it, and the remaining overrides, which set values.
    """
    base, choices = run_hydra(config_name, {}, config_dir)
    chosen: dict[str, str] = {}
    remaining = parsed

    # A choice may bring further groups to choose from, as `reward=model` brings
    # `backend@reward.backend`. The loop ends when no override chooses from a group of
    # the tree and no group is left to follow the shared backend.
    while True:
        choosing = [override for override in remaining if _key(override) in choices]
        remaining = [override for override in remaining if override not in choosing]
        chosen |= _valid_choices(choosing, problems)

        following = _groups_following_the_backend(choices, chosen)
        backend = chosen.get("backend", choices.get("backend", "engine"))
        chosen |= dict.fromkeys(following, backend)

        if not choosing and not following:
            break
        base, choices = run_hydra(config_name, chosen, config_dir)

    # What remains is either a value to set, or a choice for a place that has none.
    values = []
    for override in remaining:
        if override.package is None:
            values.append(override)
        else:
            problems.append(_no_such_group(override, choices))

    return base, choices, values


def _groups_following_the_backend(
    choices: Mapping[str, str], chosen: Mapping[str, str]
) -> list[str]:
    """Return the groups that take the shared backend, unless they were chosen."""
    return [
        key
        for key, choice in choices.items()
        if choice == _SHARED and key not in chosen
    ]


def _valid_choices(
    overrides: Sequence[Override], problems: list[Problem]
) -> dict[str, str]:
    """Return the choices that exist; the others become problems."""
    valid: dict[str, str] = {}

    for override in overrides:
        key = _key(override)
        choice = override.value()
        options = options_of(override.key_or_group)

        if override.is_delete():
            rule = "a choice cannot be left out"
            problems.append(Problem(f"~{key}", None, rule, f"Choose: {key}=..."))
        elif isinstance(choice, str) and choice in options:
            valid[key] = choice
        else:
            rule = "there is no such choice"
            fix = foreign_choice(override.key_or_group, str(choice))
            if fix is None:
                fix = did_you_mean(str(choice), options, override.key_or_group)
            problems.append(Problem(key, choice, rule, fix))

    return valid


def _no_such_group(override: Override, choices: Mapping[str, str]) -> Problem:
    key = _key(override)
    rule = "there is no such choice to make"
    fix = did_you_mean(key, sorted(choices), "choice")
    return Problem(key, override.value(), rule, fix)


def _key(override: Override) -> str:
    """Return what stands before the `=`, such as `backend@critic.backend`."""
    group = str(override.key_or_group)
    if override.package is None:
        return group
    return f"{group}@{override.package}"
