"""The configuration types of the project's own tasks, one file each.

Invariant: a type is imported without its trainer. So neither `verl-ray check` nor a
report imports one.

It may import the rest of `config`, and what lies below it.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem


def own_tasks() -> list[str]:
    """Return the names of the tasks whose types are declared here."""
    return [entry.name for entry in pkgutil.iter_modules(__path__)]


def type_of(task: object) -> type[Config] | None:
    """Return the type of a task's configuration; None if it is not declared here."""
    if task not in own_tasks():
        return None
    kind: type[Config] = declared_class(
        importlib.import_module(f"{__name__}.{task}"), Config
    )
    return kind


def declared_class(module: ModuleType, base: type[Any]) -> Any:
    """Return the only class over `base` that the file of a task declares.

    Raises:
        ConfigError: the module declares none, or more than one.
    """
    classes = [kind for kind in own_classes(module) if issubclass(kind, base)]
    if len(classes) == 1:
        return classes[0]

    names = ", ".join(kind.__name__ for kind in classes) or "none"
    rule = (
        f"the file of a task declares one class over {base.__name__}, and this one"
        f" declares {names}"
    )
    fix = f"Declare one in {module.__name__}."
    raise ConfigError([Problem("task", module.__name__, rule, fix)])


def own_classes(module: ModuleType) -> list[type[Any]]:
    """Return the classes that a module declares, without those that it imports."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
