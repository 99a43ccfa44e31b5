"""Trees of plain values: searched, resolved, and typed.

Invariant: a value that cannot be used becomes a problem, and the rest is still checked.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from controllers.tasks import typed_config
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem

TABLES = re.compile(
    r"(reward(\.components\.\w+)?|evaluation)\.functions|reward\.weights"
    r"|agent\.(environments|models|ends)|distill\.teacher"
    r"|data\.(columns|train_path|validation_path)"
)
"""Sections that are one value: a function for `default` alone serves all sources."""

MISSING = "???"
"""Hydra's mark of a value that the user must set."""

Tree = dict[str, Any]


# -------------------------------------------------------------------------- plain trees


def as_plain(tree: DictConfig) -> Tree:
    """Return the tree with its interpolations as they are written."""
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def key_exists(tree: Tree, key: str) -> bool:
    """Return whether the tree has a dotted key."""
    node: object = tree
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]

    return True


def value_at(tree: Tree, key: str) -> object:
    """Return the value at a dotted key that exists."""
    node: Any = tree
    for part in key.split("."):
        node = node[part]

    return node


def interpolations(tree: Tree) -> dict[str, list[str]]:
    """Return the keys that each key takes its value from, and so its problems, too.

    `num_ranks: ${actor.num_ranks}` takes its value from `actor.num_ranks`.
    """
    return {
        key: re.findall(r"\$\{([\w.]+)\}", str(value)) for key, value in _items(tree)
    }


def is_within(keys: Sequence[str], sections: Collection[str]) -> bool:
    """Return whether one of `keys` is one of `sections` or lies inside one."""
    return any(
        key == section or key.startswith(f"{section}.")
        for key in keys
        for section in sections
    )


def leaves(node: object) -> Iterator[str]:
    """Yield the dotted keys of everything that is not a section with content."""
    for key, _ in _items(node):
        yield key


def _items(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the same keys with their values; a user's own key may hold a dot."""
    is_section = isinstance(node, dict)

    # An empty section is a value, but the whole tree is none.
    if not is_section or (not node and prefix):
        yield prefix, node
        return

    assert isinstance(node, dict)
    for key, value in node.items():
        yield from _items(value, f"{prefix}.{key}" if prefix else str(key))


# ------------------------------------------------------------------------------- values


def resolve(tree: DictConfig, problems: list[Problem]) -> Tree:
    """Return the tree as plain values, with interpolations followed.

    A value that the user must set and has not becomes a problem and an empty text. An
    interpolation that leads nowhere becomes a problem and null.

    Args:
        tree: the composed tree, which is changed.
        problems: where problems are added.
    """
    plain = as_plain(tree)

    # The tree changes on the way, so its keys are read from a copy.
    for key, value in _items(plain):
        if value == MISSING:
            OmegaConf.update(tree, key, "")
            fix = f"Give it: {key}=..."
            if key == "data.validation_path":
                fix += f"; or, to evaluate nothing, {key}=null run.evaluate_every=0"
            problems.append(Problem(key, None, "this key must be set", fix))

    try:
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException:
        problems += _without_bad_references(tree, plain)
        resolved = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _without_bad_references(tree: DictConfig, plain: Tree) -> Iterator[Problem]:
    """Set references of the tree that lead nowhere to null, and yield their problems.

    Each key is resolved alone, so that a bad reference does not hide others.
    """
    for key, value in _items(plain):
        try:
            OmegaConf.select(tree, key, throw_on_resolution_failure=True)
        except OmegaConfBaseException as error:
            OmegaConf.update(tree, key, None)
            rule = first_line(str(error))
            yield Problem(key, value, rule, _reference_meant(value))


def _reference_meant(value: object) -> str:
    """Return what to write in place of a value with a reference that leads nowhere."""
    variables = [
        name for name in re.findall(r"\$\{(\w+)\}", str(value)) if name in os.environ
    ]
    if not variables:
        return "Refer to a key that exists, as in ${model.path}."
    name = variables[0]
    return f"An environment variable is ${name} in a path, or ${{oc.env:{name}}}."


# ----------------------------------------------------------------- typed configurations


def as_typed(tree: Tree, base: DictConfig, problems: list[Problem]) -> Config | None:
    """Return the typed configuration of a tree, as far as that is possible.

    Values that do not fit become problems, and values of `base` replace them. None if
    the configuration cannot be typed even so.

    Args:
        tree: plain values, which are changed where they do not fit.
        base: the tree without the user's values.
        problems: where problems of keys that have none yet are added.
    """
    try:
        return typed_config(tree)
    except ConfigError as error:
        bad_keys = {problem.key for problem in problems}
        problems += [
            problem for problem in error.problems if problem.key not in bad_keys
        ]

        # The problems of `base` itself are reported already.
        defaults = resolve(copy.deepcopy(base), [])
        for problem in error.problems:
            _replace(tree, defaults, problem.key.split("."))

    # A root config of the user's own may have mistakes itself.
    try:
        return typed_config(tree)
    except ConfigError:
        return None


def _replace(tree: Tree, defaults: Tree, path: list[str]) -> None:
    """Replace the value at `path` by the default, or remove it where there is none.

    Where one of the trees has no section on the way, that place is replaced.
    """
    for part in path[:-1]:
        inner = tree.get(part)
        inner_defaults = defaults.get(part)
        if not isinstance(inner, dict) or not isinstance(inner_defaults, dict):
            break

        tree = inner
        defaults = inner_defaults
        path = path[1:]

    name = path[0]
    if name in defaults:
        tree[name] = defaults[name]
    else:
        # A key that no configuration has.
        tree.pop(name, None)


def first_line(message: str) -> str:
    """Return the first line of a message, without its full stop."""
    first, _, _ = message.strip().partition("\n")
    return first.rstrip(".")
