"""The record of what each `auto` became, and what follows from it on another machine.

Invariant: the record (run.resolved) is a part of the configuration, so config.yaml and
every checkpoint hold it. Only a value that is still the recorded one counts as chosen
by a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from verl_ray.config.load import to_tree, with_changes
from verl_ray.config.schema import Config

RECORD = "run.resolved"

C = TypeVar("C", bound=Config)


def with_record(config: C, values: Mapping[str, object], *, on_gpus: bool) -> C:
    """Return a configuration that records what was resolved, now or before.

    Args:
        config: Resolved configuration.
        values: What has been resolved now, by key.
        on_gpus: Whether it was resolved for GPUs.
    """
    record = config.run.resolved.model_dump()
    for key, value in values.items():
        for recorded in record.values():
            recorded.pop(key, None)
        record["gpu" if on_gpus else "cpu"][key] = value
    return with_changes(config, {RECORD: record})


def with_auto_again(config: C) -> C:
    """Return a configuration with `auto` again wherever a run has resolved it.

    It serves for other processes or another machine. A value that the user has set
    stays, and so does one that differs from what the run resolved.
    """
    record = config.run.resolved
    chosen = _still_there({**record.cpu, **record.gpu}, config)
    nothing: dict[str, object] = {RECORD: {"cpu": {}, "gpu": {}}}
    return with_changes(config, nothing | dict.fromkeys(chosen, "auto"))


def resolved_elsewhere(config: Config, *, on_gpus: bool) -> dict[str, object]:
    """Return the settings, by key, that a run has resolved on another kind of device.

    Args:
        config: Configuration of a run, which keeps these values.
        on_gpus: Whether this machine has GPUs.
    """
    record = config.run.resolved
    return _still_there(record.cpu if on_gpus else record.gpu, config)


def _still_there(values: Mapping[str, object], config: Config) -> dict[str, object]:
    """Return those of the values that the configuration has at their keys."""
    tree = to_tree(config)
    return {key: value for key, value in values.items() if _at(tree, key) == value}


def _at(tree: Any, key: str) -> object:
    """Return the value of a dotted key; None where there is no such section."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
