"""Tasks by their names: each leads to a file that declares what sets the task apart.

Invariant: there is no list of tasks. `task: NAME` of a root config is the module
`controllers.trainers.NAME`; a name with dots is a module of the user's own. Such a
module declares one type of configuration and one `Task`. Where
`verl_ray.config.tasks.NAME` declares the type in its place, `verl-ray check` imports no
trainer.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from verl_ray.config.load import parse
from verl_ray.config.schema import Config
from verl_ray.config.tasks import declared_class, own_classes, own_tasks, type_of
from verl_ray.errors import ConfigError, Problem
from verl_ray.suggest import did_you_mean

TRAINERS = "controllers.trainers"
"""The package of the tasks' files."""


def typed_config(tree: Mapping[str, object]) -> Config:
    """Return a tree of plain values as the configuration of the task that it names.

    Raises:
        ConfigError: the task is unknown, or every problem that `parse` reports.
    """
    kind = config_type(tree.get("task"))
    return parse(tree, kind)


def config_type(task: object) -> type[Config]:
    """Return the type of a task's configuration.

    Raises:
        ConfigError: there is no such task.
    """
    # A type that is apart from its trainer is imported without the trainer.
    kind: type[Config] = type_of(task) or declared_class(task_module(task), Config)
    return kind


def sections_of_all_tasks() -> set[str]:
    """Return the sections that the configuration of some task has."""
    kinds = map(config_type, own_tasks())
    return {section for kind in kinds for section in kind.model_fields}


def task_module(task: object) -> ModuleType:
    """Import and return the file of a task.

    Raises:
        ConfigError: there is no such task.
    """
    name = f"{TRAINERS}.{task}" if _is_plain(task) else str(task)
    if task is None:
        rule = "this configuration is not one of a run: it names no task"
        fix = "Begin the file with `defaults: [grpo, _self_]`, or another root config."
        raise ConfigError([Problem("task", None, rule, fix)])

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module may exist and lack another one, which is no mistake of the name.
        if not _is_within(name, error.name):
            raise
    except (TypeError, ValueError):
        # Import refuses texts that can be no name of a module.
        pass

    suggestion = did_you_mean(str(task), tasks(), "task")
    fix = f"{suggestion} A module of your own is named with its dots."
    raise ConfigError([Problem("task", task, "there is no such task", fix)])


def tasks() -> list[str]:
    """Return the names of all tasks.

    Every trainer is imported for it, so this is for messages alone.
    """
    base: Any = importlib.import_module(f"{TRAINERS}.base").Task
    folder = importlib.import_module(TRAINERS).__path__
    names = []

    for entry in pkgutil.iter_modules(folder):
        module = importlib.import_module(f"{TRAINERS}.{entry.name}")
        if any(_is_concrete(kind, base) for kind in own_classes(module)):
            names.append(entry.name)

    return names


def _is_concrete(kind: type[Any], base: type[Any]) -> bool:
    return issubclass(kind, base) and not kind.__abstractmethods__


def _is_plain(task: object) -> bool:
    """Return whether a task is named without dots."""
    return isinstance(task, str) and re.fullmatch(r"\w+", task) is not None


def _is_within(name: str, missing: str | None) -> bool:
    """Return whether a missing module is the named one or a package that it is in."""
    if missing is None:
        return False
    return name == missing or name.startswith(f"{missing}.")
