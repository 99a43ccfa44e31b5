"""The type of a rule, and the refusals that many rules share.

Invariant: a rule only inspects a configuration. It yields what is wrong and never
changes or completes a setting. Deliberately not here: any rule, and the list of them
(the package).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from verl_ray.config.schema import Config
from verl_ray.errors import Problem

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class OverriddenKeys:
    """The dotted keys that the user set on the command line."""

    keys: Collection[str]
    """The keys; `critic.backend` stands for a whole section."""
    evaluates: bool
    """Whether the command is a single evaluation, whatever run.evaluate_every says."""

    def under(self, section: str) -> list[str]:
        """Return the overridden keys that are `section` or lie inside it, sorted."""
        return sorted(
            key for key in self.keys if key == section or key.startswith(f"{section}.")
        )


Rule = Callable[[Config, OverriddenKeys], Iterator[Problem]]
"""A rule of every task."""

TaskRule = Callable[[Any, OverriddenKeys], Iterator[Problem]]
"""A rule of one task, which takes that task's configuration."""


def set_exactly_when(
    required: bool, key: str, value: object, because: str, usual: object
) -> Iterator[Problem]:
    """Yield a problem unless a key has a value exactly when it is required.

    Args:
        required: whether the run reads the key.
        key: the dotted key.
        value: its value in the configuration.
        because: the setting that reads the key or does not, such as `a.b=c`.
        usual: a value to recommend if there is none.
    """
    if required and value is None:
        yield Problem(key, None, f"{because} needs it", f"{usual} is usual.")
    if not required and value is not None:
        yield Problem(key, value, f"{because} does not use it", "Set it to null.")


def ignored_settings(
    keys: list[str], config: Config, reason: str, fix: str = "Leave it out."
) -> Iterator[Problem]:
    """Yield a problem for each key that the user set and the run would not read."""
    rule = f"this setting would be ignored: {reason}"

    for key in keys:
        yield Problem(key, value_of(config, key), rule, fix)


def follow_reference(config: Config, value: object) -> object:
    """Return the value that a text such as `${run.seed}` refers to.

    Any other value is returned as it is.
    """
    if not isinstance(value, str):
        return value

    reference = _REFERENCE.fullmatch(value)
    if reference is None:
        return value
    return value_of(config, reference[1])


def value_of(config: Config, key: str) -> object:
    """Return the value at a dotted key; for a section with a `kind`, the kind.

    None for a key that the configuration does not have. The user may have typed one
    that was refused already.
    """
    node: object = config.model_dump()
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None

    # The user chose the section by its kind, so that is what a message shows.
    if isinstance(node, dict) and "kind" in node:
        return node["kind"]
    return node
