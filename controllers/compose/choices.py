"""What the user chose from groups (`backend=fsdp`), which makes the tree that other overrides set values in.

Invariant: overrides are parsed before Hydra sees them, so that all bad ones are found at once. Deliberately not here:
overrides that set a value (`overrides.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from controllers.compose.sources import options_of, run_hydra
from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import Problem


def parse_overrides(overrides: Sequence[str], problems: list[Problem]) -> list[Override]:
    """The overrides that can be understood; the others become problems."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            fix = "Write key=value; quote lists, dicts and blanks for the shell: 'key=[1, 2]'."
            problems.append(Problem(text.partition("=")[0] or text, text, "this override cannot be read", fix))
            continue
        if override.is_sweep_override():
            fix = f"Give one value; a list is written '{override.key_or_group}=[...]'."
            problems.append(Problem(_key(override), _raw(text), "several values are a sweep, and this is one run", fix))
        elif override.key_or_group == "":
            problems.append(Problem(text, text, "an override needs a key", "Write key=value."))
        else:
            parsed.append(override)
    return parsed


def choose(
    config_name: str, parsed: list[Override], problems: list[Problem], *, own_configs: bool
) -> tuple[DictConfig, dict[str, str], list[Override]]:
    """The tree under all choices from groups, the choices, and the overrides that set a value. A choice may bring
    further ones (`reward=model` brings `backend@reward.backend`), so they are made until none is left."""
    base, choices = run_hydra(config_name, {}, own_configs)
    made: dict[str, str] = {}
    left = parsed
    while True:
        now = [override for override in left if _key(override) in choices]
        left = [override for override in left if override not in now]
        made |= _choices_of(now, problems)
        shared = [key for key, choice in choices.items() if choice == "_shared" and key not in made]
        made |= dict.fromkeys(shared, made.get("backend", choices.get("backend", "engine")))
        if not now and not shared:
            break
        base, choices = run_hydra(config_name, made, own_configs)
    for override in left:
        if override.package is not None:
            fix = did_you_mean(_key(override), sorted(choices), "choice")
            problems.append(Problem(_key(override), override.value(), "there is no such choice to make", fix))
    return base, choices, [override for override in left if override.package is None]


def _choices_of(overrides: list[Override], problems: list[Problem]) -> dict[str, str]:
    """The valid ones among overrides that choose from a group."""
    made: dict[str, str] = {}
    for override in overrides:
        group, key, choice = override.key_or_group, _key(override), override.value()
        if override.is_delete():
            problems.append(Problem(f"~{key}", None, "a choice cannot be left out", f"Choose: {key}=..."))
        elif not isinstance(choice, str) or choice not in options_of(group):
            problems.append(_bad_choice(group, key, choice))
        else:
            made[key] = choice
    return made


def _bad_choice(group: str, key: str, choice: object) -> Problem:
    return Problem(key, choice, "there is no such choice", did_you_mean(str(choice), options_of(group), group))


def _key(override: Override) -> str:
    group = str(override.key_or_group)
    return group if override.package is None else f"{group}@{override.package}"


def _raw(line: str) -> str:
    return line.partition("=")[2]
