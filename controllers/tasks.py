"""From the name of a task to its file, which declares everything that sets the task apart.

Invariant: nobody keeps a list of tasks. `task: NAME` of a root config is the module `controllers.trainers.NAME`; a name
with dots is a module of the user's own. Such a module declares one type of configuration and one `Task`; where
`verl_ray.config.tasks.NAME` declares the type in its place, `verl-ray check` imports no trainer. Deliberately not here:
what a task is (`controllers/trainers/base.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from verl_ray.config.load import parse
from verl_ray.config.schema import Config
from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import ConfigError, Problem

TRAINERS, CONFIGURATIONS = "controllers.trainers", "verl_ray.config.tasks"


def typed(tree: Mapping[str, object]) -> Config:
    """A tree of plain values as the configuration of the task that it names.

    Raises ConfigError with every problem at once: an unknown task, or whatever `parse` finds.
    """
    return parse(tree, config_type(tree.get("task")))


def config_type(task: object) -> type[Config]:
    """The type of a task's configuration. Raises ConfigError if there is no such task."""
    light = f"{CONFIGURATIONS}.{task}"
    is_light = _is_plain(task) and importlib.util.find_spec(light) is not None
    kind: type[Config] = declared(importlib.import_module(light) if is_light else module_of(task), Config)
    return kind


def module_of(task: object) -> ModuleType:
    """The file of a task. Raises ConfigError if there is no such task."""
    name = f"{TRAINERS}.{task}" if _is_plain(task) else str(task)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not _is_within(name, error.name):
            raise  # it is there, and lacks something itself
    except (TypeError, ValueError):  # no name of a module
        pass
    fix = f"{did_you_mean(str(task), tasks(), 'task')} A module of your own is named with its dots."
    raise ConfigError([Problem("task", task, "there is no such task", fix)])


def declared(module: ModuleType, base: type[Any]) -> Any:
    """The one class over `base` that the module declares. Raises ConfigError if there is none, or more than one."""
    found = [one for one in _classes(module) if issubclass(one, base)]
    if len(found) != 1:
        names = ", ".join(one.__name__ for one in found) or "none"
        rule = f"the file of a task declares one class over {base.__name__}, and this one declares {names}"
        raise ConfigError([Problem("task", module.__name__, rule, f"Declare one in {module.__name__}.")])
    return found[0]


def tasks() -> list[str]:
    """The names of all tasks. Every trainer is imported, so this is for messages alone."""
    folder = importlib.import_module(TRAINERS).__path__
    modules = (importlib.import_module(f"{TRAINERS}.{one.name}") for one in pkgutil.iter_modules(folder))
    base: Any = importlib.import_module(f"{TRAINERS}.base").Task
    return [
        module.__name__.rpartition(".")[2]
        for module in modules
        if any(issubclass(one, base) and not one.__abstractmethods__ for one in _classes(module))
    ]


def _classes(module: ModuleType) -> list[type[Any]]:
    """Those that it declares, and not those that it imports."""
    return [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]


def _is_plain(task: object) -> bool:
    return isinstance(task, str) and re.fullmatch(r"\w+", task) is not None


def _is_within(name: str, missing: str | None) -> bool:
    return missing is not None and (name == missing or name.startswith(f"{missing}."))
