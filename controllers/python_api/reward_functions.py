"""Reward functions of the caller's process, as texts that name them.

Invariant: the processes that score find the same function. One that can be imported
is named; any other is pickled by value, with all that it refers to.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import cloudpickle

from controllers.compose.grammar import overrides_of
from controllers.python_api.contract import Reward, RewardFunction
from verl_ray.disk import replace_file
from verl_ray.errors import ConfigError, Problem

_KEY = "reward.functions"


def has_functions(reward: Reward | None) -> bool:
    """Return whether a function is among the rewards, and not only names."""
    return any(callable(function) for function in _by_source(reward).values())


def reward_specs(reward: Reward, folder: Path) -> list[str]:
    """Return the overrides that name the rewards.

    Args:
        reward: A name, a function, or one of these or a table by data source.
        folder: Where functions are written that cannot be imported.

    Raises:
        ConfigError: A function cannot be written.
    """
    specs = {}
    for number, (source, function) in enumerate(_by_source(reward).items()):
        path = folder / (f"reward_{number}.pkl" if number else "reward.pkl")
        # A table names a function, with its arguments.
        is_name = isinstance(function, str | Mapping)
        specs[source] = function if is_name else _spec(source, function, path)

    # In a dict, a data source may have any name.
    return overrides_of({"reward": {"functions": specs}})


def _by_source(reward: Reward | None) -> dict[str, RewardFunction]:
    if reward is None:
        return {}
    if isinstance(reward, Mapping):
        return dict(reward)
    return {"default": reward}


def _spec(source: str, function: object, path: Path) -> str:
    """Return the text that names a function, which is written if it has no name."""
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    name = getattr(function, "__qualname__", "")
    is_importable = (
        module is not None
        and module.__name__ != "__main__"
        and getattr(module, name, None) is function
    )
    if is_importable and module is not None:
        # A package runs under its name alone: its file may import beside itself.
        if "." in module.__name__ or hasattr(module, "__path__"):
            return f"{module.__name__}:{name}"
        # Only this process may know the folder of a module that is in no package.
        file = getattr(module, "__file__", None) or ""
        if file.endswith(".py"):
            return f"{Path(file).absolute()}:{name}"

    if not callable(function):
        rule = f"this is a {type(function).__name__}"
        fix = "Give a function, a class, the name of a built-in, or file.py:function."
        raise ConfigError([Problem(f"{_KEY}.{source}", repr(function), rule, fix)])
    try:
        content: bytes = cloudpickle.dumps(function)
    # Whatever the function refers to may fail in its own way.
    except Exception as error:
        rule = f"it cannot be sent to another process: {error}"
        fix = "Define what it uses inside of it, or in a module."
        problem = Problem(f"{_KEY}.{source}", name or repr(function), rule, fix)
        raise ConfigError([problem]) from error
    replace_file(path, content)
    return str(path)
