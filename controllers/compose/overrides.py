"""Overrides that set a value (`rollout.group_size=16`), compared with the composed tree.

Invariant: one whose key does not exist, or that would reach nothing, is a problem with the nearest right answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from controllers.compose.trees import Tree, as_plain, key_exists, leaves, value_at
from verl_ray.backends import BACKENDS
from verl_ray.config.renamed import new_name
from verl_ray.config.suggest import did_you_mean, either
from verl_ray.errors import Problem

FREE_SECTIONS = re.compile(
    r"(rollout|reward(\.components\.\w+)?\.engine)\.vllm_args\..+"
    r"|(reward(\.components\.\w+)?|evaluation)\.functions\..+|reward\.weights\..+"
)
"""Keys in sections whose keys are the user's own."""


def accept(
    values: list[Override], base: DictConfig, choices: Mapping[str, str], problems: list[Problem]
) -> list[tuple[str, Override]]:
    """Every override whose key exists, beside the key it sets. `backend.X` is expanded to the roles first, so
    that a role's own override, wherever it stands, wins."""
    shared: list[tuple[str, Override]] = []
    own: list[tuple[str, Override]] = []
    tree = as_plain(base)
    keys = sorted([*leaves(tree), *choices])
    nulls = [str(override.key_or_group) for override in values if _sets_null(override)]
    roles_backends = {f"{name}.backend" for name in _backend_roles(choices)}
    for override in values:
        key = str(override.key_or_group)
        null = next((section for section in nulls if key.startswith(f"{section}.")), None)
        if null is not None:
            problems.append(_inside_null(override, null))
        elif key.startswith("backend."):
            roles = [name for name in _backend_roles(choices) if key_exists(tree, f"{name}.{key}")]
            problems += [] if roles and key != "backend.kind" else [_bad_backend_key(override)]
            if key != "backend.kind":
                shared += [(f"{name}.{key}", override) for name in roles]
        elif re.fullmatch(r"[\w.]+\.backend\.kind", key) or (
            key in roles_backends and isinstance(override.value(), str)
        ):
            group = f"backend@{key.removesuffix('.kind')}"
            rule = "a backend is chosen as a whole, with its settings"
            problems.append(Problem(key, override.value(), rule, f"Choose it with {group}={override.value()}."))
        elif key == "reward.kind" and not override.is_delete():
            rule = "a reward is chosen as a whole, with its settings"
            problems.append(Problem(key, override.value(), rule, f"Choose it with reward={override.value()}."))
        elif key == "task":
            problems.append(Problem(key, override.value(), "a root config fixes this", "Choose another --config-name."))
        elif override.is_delete():
            if FREE_SECTIONS.fullmatch(key) and key_exists(tree, key):
                own.append((key, override))
            else:
                rule = "a key cannot be left out; the YAML holds every value"
                problems.append(Problem(f"~{key}", None, rule, f"Set {key}=null where it allows that."))
        elif key_exists(tree, key) or FREE_SECTIONS.fullmatch(key):
            own.append((key, override))
        else:
            problems.append(_unknown_key(override, tree, keys))
    return shared + own


def _bad_backend_key(override: Override) -> Problem:
    key = override.key_or_group
    if key == "backend.kind":
        rule = "a backend is chosen as a whole, with its settings"
        return Problem(key, override.value(), rule, f"Choose it with backend={override.value()}.")
    return _unknown_backend_field("backend", override, "backend.")


def _unknown_backend_field(group: str, override: Override, prefix: str) -> Problem:
    key = override.key_or_group
    name = key.removeprefix(prefix)
    having = [f"{group}={choice}" for choice, settings in BACKENDS.items() if name in settings.model_fields]
    if having:
        fix = f"It belongs to {either(having)}."
        return Problem(key, override.value(), "the chosen backend has no such setting", fix)
    known = dict.fromkeys(field for settings in BACKENDS.values() for field in settings.model_fields if field != "kind")
    return Problem(key, override.value(), "no such key", did_you_mean(key, [prefix + field for field in known], "key"))


def _unknown_key(override: Override, tree: Tree, keys: list[str]) -> Problem:
    key = str(override.key_or_group)
    role, backend, _ = key.partition(".backend.")
    if backend and key_exists(tree, f"{role}.backend"):
        return _unknown_backend_field(f"backend@{role}.backend", override, f"{role}.backend.")
    parts = key.split(".")
    for length in range(1, len(parts)):
        parent = ".".join(parts[:length])
        if key_exists(tree, parent) and value_at(tree, parent) is None:
            return _inside_null(override, parent)
    return Problem(key, override.value(), "no such key", new_name(key) or did_you_mean(key, keys, "key"))


def _inside_null(override: Override, section: str) -> Problem:
    rule = f"this setting would be ignored: {section} is null"
    return Problem(override.key_or_group, override.value(), rule, f"Leave it out, or give all of {section}.")


def _sets_null(override: Override) -> bool:
    return not override.is_delete() and override.value() is None


def _backend_roles(choices: Mapping[str, str]) -> list[str]:
    return sorted(match[1] for key in choices if (match := re.fullmatch(r"backend@([\w.]+)\.backend", key)))


def set_value(tree: DictConfig, key: str, override: Override) -> None:
    """Set the value at `key`; a dict is merged into a section that is there."""
    if override.is_delete():
        section, _, name = key.rpartition(".")
        with open_dict(tree):
            del OmegaConf.select(tree, section)[name]
    else:
        OmegaConf.update(tree, key, override.value(), merge=True, force_add=True)


def touched_keys(override: Override) -> Iterator[str]:
    """The keys that an override sets: those inside a dict that it gives, the section that a group choice fills."""
    if override.package is not None:
        yield str(override.package)
        return
    value = None if override.is_delete() else override.value()
    yield from leaves({override.key_or_group: value}) if isinstance(value, dict) else (override.key_or_group,)
