"""Overrides that choose from groups (`backend=fsdp`), and those that set a value.

The choices make the tree, which the values (`rollout.group_size=16`) are compared with.
Invariant: an override whose key or choice does not exist, or that would reach no role,
is a problem with the nearest right answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from controllers.compose.grammar import key_of
from controllers.compose.sources import options_of, run_hydra
from controllers.compose.trees import (
    TABLES,
    Tree,
    as_plain,
    is_within,
    key_exists,
    leaves,
    value_at,
)
from controllers.tasks import sections_of_all_tasks
from verl_ray.backends import BACKENDS, DEFAULT_BACKEND
from verl_ray.config.advice import DEVICE, advice_on, foreign_choice
from verl_ray.config.optimizers import OPTIMIZERS
from verl_ray.errors import Problem
from verl_ray.settings.section import Section
from verl_ray.shell import for_shell, in_grammar
from verl_ray.suggest import did_you_mean, either

FREE_SECTIONS = re.compile(
    r"(rollout|reward(\.components\.\w+)?\.engine)\.vllm_args\..+"
    r"|(reward(\.components\.\w+)?|evaluation)\.functions\..+|reward\.weights\..+"
    r"|agent\.(environments|models|ends)\..+"
    r"|data\.chat_template_kwargs\..+"
)
"""Keys in sections whose keys are the user's own."""

_GROUP_OF_BACKEND = re.compile(r"backend@([\w.]+)\.backend")

# Groups whose choices have settings of their own.
_SETTINGS: Mapping[str, Mapping[str, type[Section]]] = {
    "backend": BACKENDS,
    "optimizer": OPTIMIZERS,
}

# The choice that stands for the backend of all roles, where Hydra cannot refer to it.
_SHARED = "_shared"


# ------------------------------------------------------------------------------ choices


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
        choosing = [
            override for override in remaining if _group_of(override) in choices
        ]
        remaining = [override for override in remaining if override not in choosing]
        chosen |= _valid_choices(choosing, problems)

        following = _groups_following_the_backend(choices, chosen)
        backend = chosen.get("backend", choices.get("backend", DEFAULT_BACKEND))
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


def _group_of(override: Override) -> str:
    """Return the key of the group that an override may choose from.

    A group inside of another one is named as the section that it fills: a text for
    `algorithm.kl` is a choice of `algorithm/kl`, whose keys can also be set.
    """
    key = key_of(override)
    is_text = not override.is_delete() and isinstance(override.value(), str)
    if override.package is None and is_text:
        return key.replace(".", "/")
    return key


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
        key = key_of(override)
        group = _group_of(override)
        choice = override.value()
        options = options_of(group.partition("@")[0])

        if override.is_delete():
            rule = "a choice cannot be left out"
            problems.append(Problem(f"~{key}", None, rule, f"Choose: {key}=..."))
        elif isinstance(choice, str) and choice in options:
            valid[group] = choice
        else:
            rule = "there is no such choice"
            fix = foreign_choice(override.key_or_group, str(choice))
            if fix is None:
                fix = did_you_mean(str(choice), options, override.key_or_group)
            problems.append(Problem(key, choice, rule, fix))

    return valid


def _no_such_group(override: Override, choices: Mapping[str, str]) -> Problem:
    key = key_of(override)
    rule = "there is no such choice to make"
    fix = did_you_mean(key, sorted(choices), "choice")
    return Problem(key, override.value(), rule, fix)


# ------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class _ComposedTree:
    """The tree under all choices, which overrides are compared with."""

    tree: Tree
    keys: list[str]
    """Every key that an override may have, choices included; sorted."""
    groups: Mapping[str, str]
    """The group that fills each section that has one of its own, by section."""
    backend_roles: list[str]
    """Roles that run on a backend; sorted."""
    null_sections: list[str]
    """Keys that another override sets to null."""
    set_values: Mapping[str, object]
    """What overrides set, by key; of several the last one."""

    def roles_with(self, backend_key: str) -> list[str]:
        """Return the roles whose backend has a setting, such as `backend.dtype`."""
        return [
            role
            for role in self.backend_roles
            if key_exists(self.tree, f"{role}.{backend_key}")
        ]


def accept(
    values: list[Override],
    base: DictConfig,
    choices: Mapping[str, str],
    problems: list[Problem],
) -> list[tuple[str, Override]]:
    """Return every override whose key exists, with the key that it sets.

    An override of `backend.X` is expanded to one per role. These come first, so that a
    role's own override wins wherever it stands on the command line.

    Args:
        values: the overrides that set a value.
        base: the tree under all choices.
        choices: the choice of every group, by the key that overrides it.
        problems: where the refused overrides are added.
    """
    shared: list[tuple[str, Override]] = []
    own: list[tuple[str, Override]] = []
    tree = as_plain(base)
    composed = _ComposedTree(
        tree=tree,
        keys=sorted([*leaves(tree), *(key.replace("/", ".") for key in choices)]),
        groups=_groups_by_section(choices),
        backend_roles=_backend_roles(choices),
        null_sections=[_key(override) for override in values if _sets_null(override)],
        set_values={
            _key(override): override.value()
            for override in values
            if not override.is_delete()
        },
    )

    for override in values:
        key = _key(override)
        refusal = _refusal(override, composed)

        if refusal is not None:
            problems.append(refusal)
        elif key.startswith("backend."):
            shared += [(f"{role}.{key}", override) for role in composed.roles_with(key)]
        else:
            own.append((key, override))

    # Of several overrides of a key the last one wins.
    return shared + own


def _refusal(override: Override, composed: _ComposedTree) -> Problem | None:
    """Return why an override cannot be set; None if it can."""
    key = _key(override)

    # A section that is null has no settings, whatever the order of the overrides.
    for section in composed.null_sections:
        if key.startswith(f"{section}."):
            return _inside_null(override, section)

    if key.startswith("backend."):
        return _shared_backend_refusal(override, composed)

    whole_choice = _refusal_of_a_part(override, composed)
    if whole_choice is not None:
        return whole_choice

    exists = key_exists(composed.tree, key)
    is_free = _is_free(key, composed.tree)

    # Only keys that the user may add can also be taken out.
    if override.is_delete():
        if exists and is_free:
            return None
        rule = "a key cannot be left out; the YAML holds every value"
        return Problem(f"~{key}", None, rule, f"Set {key}=null where it allows that.")

    section, _, name = key.rpartition(".")
    if is_free and not exists:
        function = composed.set_values.get(section)
        if function is None and key_exists(composed.tree, section):
            function = value_at(composed.tree, section)
        # A function that has no arguments is a text.
        if isinstance(function, str):
            rule = f"{section} is {function} and has nothing inside"
            table = f"{{function: {in_grammar(function)}, {name}: ...}}"
            whole = for_shell([f"{section}={table}"])
            fix = f"Give a function its arguments as a whole: {whole}."
            return Problem(key, override.value(), rule, fix)

    if exists or is_free:
        return None
    return _unknown_key(override, composed)


def _is_free(key: str, tree: Tree) -> bool:
    """Return whether a key is the user's own, in a section that the run has."""
    if FREE_SECTIONS.fullmatch(key) is None:
        return False
    section, _, _ = key.partition(".")
    return key_exists(tree, section)


def _shared_backend_refusal(
    override: Override, composed: _ComposedTree
) -> Problem | None:
    """Return why a setting of every role's backend cannot be set; None if it can."""
    key = _key(override)

    if key == "backend.kind":
        return _whole_choice(key, override.value(), "backend", "backend")

    # Roles may run on different backends, and it is enough if one has the setting.
    if composed.roles_with(key):
        return None
    return _unknown_backend_field("backend", override, "backend.")


def _refusal_of_a_part(override: Override, composed: _ComposedTree) -> Problem | None:
    """Return why a key cannot be set that only a choice from a group may set.

    None if the key is no such key.
    """
    key = _key(override)
    value = override.value()

    # A text in place of a section is meant as a choice.
    section = key.removesuffix(".kind")
    if section in composed.groups and (section != key or isinstance(value, str)):
        group = composed.groups[section]
        return _whole_choice(key, value, group, f"{group}@{section}")

    if key == "reward.kind" and not override.is_delete():
        return _whole_choice(key, value, "reward", "reward")

    if key == "task":
        rule = "a root config fixes this"
        return Problem(key, value, rule, "Choose another --config-name.")

    return None


def _whole_choice(key: str, value: object, group: str, choosing: str) -> Problem:
    """Return the problem of a key that is set in the place of a choice.

    Args:
        key: the key.
        value: what it is set to.
        group: the group that is chosen from.
        choosing: the key that makes the choice.
    """
    article = "an" if group[0] in "aeiou" else "a"
    rule = f"{article} {group} is chosen as a whole, with its settings"
    options = options_of(group)
    if value not in options:
        fix = f"{did_you_mean(str(value), options, group)} Choose with {choosing}=..."
        return Problem(key, value, rule, fix)

    typed = for_shell([(choosing, value)])
    fix = f"Choose it with {typed}; there is {', '.join(sorted(options))}."
    return Problem(key, value, rule, fix)


def _unknown_field(group: str, override: Override, prefix: str) -> Problem | None:
    """Return the problem of a setting that belongs to a choice that was not made.

    None if it belongs to none.

    Args:
        group: the key that chooses, such as `optimizer@actor.optimizer`.
        override: the override.
        prefix: what stands before the setting's name in the key.
    """
    key = _key(override)
    name = key.removeprefix(prefix)
    kind = group.partition("@")[0]
    owners = [
        f"{group}={choice}"
        for choice, settings in _SETTINGS[kind].items()
        if name in settings.model_fields
    ]
    if not owners:
        return None
    rule = f"the chosen {kind} has no such setting"
    return Problem(key, override.value(), rule, f"It belongs to {either(owners)}.")


def _unknown_backend_field(group: str, override: Override, prefix: str) -> Problem:
    """Return the problem of a setting that the chosen backend does not have.

    Args:
        group: the group that a backend is chosen from, such as `backend@actor.backend`.
        override: the override.
        prefix: what stands before the setting's name in the key.
    """
    key = _key(override)
    owned = _unknown_field(group, override, prefix)
    if owned is not None:
        return owned

    # Backends share many settings; each is suggested once, in the order of backends.
    known: dict[str, None] = {}
    for settings in BACKENDS.values():
        known |= dict.fromkeys(f"{prefix}{field}" for field in settings.model_fields)
    known.pop(f"{prefix}kind", None)

    fix = DEVICE if key == f"{prefix}device" else did_you_mean(key, list(known), "key")
    return Problem(key, override.value(), "no such key", fix)


def _unknown_key(override: Override, composed: _ComposedTree) -> Problem:
    """Return the problem of a key that does not exist."""
    key = _key(override)

    role, is_backend_key, _ = key.partition(".backend.")
    if is_backend_key and key_exists(composed.tree, f"{role}.backend"):
        section = f"{role}.backend"
        return _unknown_backend_field(f"backend@{section}", override, f"{section}.")

    section = key.rpartition(".")[0]
    if composed.groups.get(section) == "optimizer":
        group = f"optimizer@{section}"
        owned = _unknown_field(group, override, f"{section}.")
        if owned is not None:
            return owned

    # The key may lie in a section that the tree itself sets to null.
    parts = key.split(".")
    for length in range(1, len(parts)):
        section = ".".join(parts[:length])
        if not key_exists(composed.tree, section):
            continue
        if value_at(composed.tree, section) is None:
            return _inside_null(override, section)

    section = parts[0]
    if not key_exists(composed.tree, section) and section in sections_of_all_tasks():
        rule = f"a run of the task {composed.tree['task']} has no section {section}"
        fix = "Leave it out, or choose another --config-name."
        return Problem(key, override.value(), rule, fix)

    fix = advice_on(key, composed.keys)
    return Problem(key, override.value(), "no such key", fix)


def _inside_null(override: Override, section: str) -> Problem:
    rule = f"this setting would be ignored: {section} is null"
    fix = f"Leave it out, or give all of {section}."
    name = _key(override).removeprefix(f"{section}.")
    if TABLES.fullmatch(section) and "." not in name:
        value = override.get_value_element_as_str()
        typed = for_shell([f"{section}={{{name}: {value}}}"])
        fix = f"Write {typed}."
    return Problem(override.key_or_group, override.value(), rule, fix)


def _sets_null(override: Override) -> bool:
    return not override.is_delete() and override.value() is None


def _key(override: Override) -> str:
    return str(override.key_or_group)


def _groups_by_section(choices: Mapping[str, str]) -> dict[str, str]:
    """Return the group of each section that a choice of its own fills."""
    pairs = [key.split("@") for key in choices if "@" in key]
    return {section: group for group, section in pairs}


def _backend_roles(choices: Mapping[str, str]) -> list[str]:
    """Return the roles that a backend is chosen for, sorted."""
    roles = []

    for key in choices:
        group = _GROUP_OF_BACKEND.fullmatch(key)
        if group is not None:
            roles.append(group[1])

    return sorted(roles)


def set_value(tree: DictConfig, key: str, override: Override) -> None:
    """Set the value at `key`, or delete the key.

    A dict is merged into the section at `key`, or replaces it where its keys are the
    user's own. What another override has put in place of a section is reported when
    values are typed, and has nothing inside.
    """
    section, _, name = key.rpartition(".")
    around = _present(tree, section) if section else tree
    if around is not None and not OmegaConf.is_dict(around):
        return

    if not override.is_delete():
        value = override.value()
        is_section = OmegaConf.is_dict(_present(tree, key))
        merges = isinstance(value, dict) and is_section and not TABLES.fullmatch(key)
        OmegaConf.update(tree, key, value, merge=merges, force_add=True)
        return

    # Another override may have replaced the section that had the key.
    if isinstance(around, DictConfig) and name in around:
        with open_dict(tree):
            del around[name]


def forget_resolved(tree: DictConfig, key: str, override: Override) -> None:
    """Take what the user sets now out of a run's record of what was `auto`."""
    record = _present(tree, "run.resolved")
    if override.is_delete() or not isinstance(record, DictConfig):
        return

    typed = list(leaves({key: override.value()}))
    with open_dict(tree):
        for values in record.values():
            # What the user may have put there is reported when values are typed.
            recorded = list(values) if isinstance(values, DictConfig) else []
            for name in recorded:
                if is_within(typed, [name]):
                    del values[name]


def _present(tree: DictConfig, key: str) -> object:
    """Return what is at a key; None for nothing, or a reference to nothing."""
    value: object = OmegaConf.select(tree, key, throw_on_resolution_failure=False)
    return value


def touched_keys(override: Override) -> Iterator[str]:
    """Yield the keys that an override sets.

    They are the keys inside a dict, or the section that a choice from a group fills.
    """
    if override.package is not None:
        yield str(override.package)
        return

    value = None if override.is_delete() else override.value()
    if isinstance(value, dict):
        yield from leaves({override.key_or_group: value})
    else:
        yield override.key_or_group
