"""Configuration trees as plain dictionaries: looked into, resolved, typed.

Invariant: every local path in a configuration is absolute, because a worker's current folder is not the user's.
Deliberately not here: overrides (`overrides.py`), and what the values mean (`verl_ray.config`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from controllers.tasks import typed
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem

PATHS = re.compile(r"run\.dir|run\.resume|rollout\.sync\.folder|data\.(train|validation)_path|([\w.]+\.)?model\.path")
"""Keys that hold a path."""


FUNCTIONS = re.compile(r"(reward(\.components\.\w+)?|evaluation)\.functions\..+")
"""Keys that may hold a path and a function in it."""


NO_CHECKPOINT = ("auto", "none", "true", "false")
"""What run.resume may say besides a path, in any spelling: the rules refuse the wrong ones."""


Tree = dict[str, Any]


def as_plain(tree: DictConfig) -> Tree:
    """The tree with its interpolations as they are written."""
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def key_exists(tree: Tree, key: str) -> bool:
    node: object = tree
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def value_at(tree: Tree, key: str) -> object:
    node: Any = tree
    for part in key.split("."):
        node = node[part]
    return node


def interpolations(tree: Tree) -> dict[str, list[str]]:
    """The keys that each key takes its value from (`num_ranks: ${actor.num_ranks}`), and so its problems too."""
    return {key: re.findall(r"\$\{([\w.]+)\}", str(value)) for key, value in _items(tree)}


def is_within(keys: Sequence[str], sections: Collection[str]) -> bool:
    """Whether one of `keys` is one of `sections` or lies inside one."""
    return any(key == section or key.startswith(f"{section}.") for key in keys for section in sections)


def leaves(node: object) -> Iterator[str]:
    """Dotted keys of everything that is not a non-empty section."""
    return (key for key, _ in _items(node))


def _items(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The same with its values; a key of a user's own may hold a dot."""
    if isinstance(node, dict) and (node or not prefix):
        for key, value in node.items():
            yield from _items(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def resolve(tree: DictConfig, problems: list[Problem]) -> Tree:
    """Plain values: interpolations followed; what is missing becomes a problem and an empty text."""
    plain = as_plain(tree)
    for key, value in _items(plain):
        if value == "???":
            OmegaConf.update(tree, key, "")
            problems.append(Problem(key, None, "this key must be set", f"Give it on the command line: {key}=..."))
    for key, value in _items(plain):
        try:
            OmegaConf.select(tree, key, throw_on_resolution_failure=True)
        except OmegaConfBaseException as error:
            OmegaConf.update(tree, key, None)
            fix = "Refer to a key that exists, as in ${model.path}."
            problems.append(Problem(key, value, first_line(error), fix))
    resolved = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(resolved, dict)
    _make_paths_absolute(resolved)
    return {str(key): value for key, value in resolved.items()}


def _make_paths_absolute(node: object, prefix: str = "") -> None:
    """In place, `~` included; what is no local path (an empty text, a URL, a built-in reward function) stays."""
    if not isinstance(node, dict):
        return
    for name, value in node.items():
        key = f"{prefix}{name}"
        if not isinstance(value, str):
            _make_paths_absolute(value, f"{key}.")
        elif FUNCTIONS.fullmatch(key):
            path, colon, function = value.rpartition(":")
            node[name] = f"{_absolute(path)}:{function}" if colon else value
        elif PATHS.fullmatch(key) and not (key == "run.resume" and value.lower() in NO_CHECKPOINT):
            node[name] = _absolute(value)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path.strip() and "://" not in path else path


def as_typed(tree: Tree, base: DictConfig, problems: list[Problem]) -> Config | None:
    """`tree` typed. Values that do not fit become problems and are replaced by those of `base`."""
    try:
        return typed(tree)
    except ConfigError as error:
        known_bad = {problem.key for problem in problems}
        problems += [problem for problem in error.problems if problem.key not in known_bad]
        defaults = resolve(base, [])
        for problem in error.problems:
            _replace(tree, defaults, problem.key.split("."))
    try:
        return typed(tree)
    except ConfigError:
        return None


def _replace(tree: Tree, defaults: Tree, path: list[str]) -> None:
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict) or not isinstance(defaults.get(part), dict):
            break
        tree, defaults = tree[part], defaults[part]
        path = path[1:]
    if path[0] in defaults:
        tree[path[0]] = defaults[path[0]]
    else:
        tree.pop(path[0], None)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
