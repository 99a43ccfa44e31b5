"""What a rule is, and the two refusals that many rules give.

Invariant: a rule only looks: it yields what is wrong and never changes or completes a setting. Deliberately not here:
any rule, and the list of them (the package).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from verl_ray.config.schema import Config
from verl_ray.errors import Problem


@dataclass(frozen=True)
class Overridden:
    """The dotted keys that the user set on the command line; `critic.backend` stands for a whole section."""

    keys: Collection[str]
    evaluates: bool
    """The command is one evaluation, whatever run.evaluate_every says."""

    def under(self, section: str) -> list[str]:
        """The overridden keys that are `section` or lie inside it."""
        return sorted(key for key in self.keys if key == section or key.startswith(f"{section}."))


Rule = Callable[[Config, Overridden], Iterator[Problem]]

TaskRule = Callable[[Any, Overridden], Iterator[Problem]]
"""A rule of one task, which takes that task's configuration."""


def iff(wanted: bool, key: str, value: object, because: str, usual: object) -> Iterator[Problem]:
    """`key` has a value exactly when `wanted`."""
    if wanted and value is None:
        yield Problem(key, None, f"{because} needs it", f"{usual} is usual.")
    if not wanted and value is not None:
        yield Problem(key, value, f"{because} does not use it", "Set it to null.")


def ignored(keys: list[str], config: Config, reason: str, fix: str = "Leave it out.") -> Iterator[Problem]:
    """Settings that the user made and the run would not look at."""
    for key in keys:
        yield Problem(key, _value(config, key), f"this setting would be ignored: {reason}", fix)


def resolved(config: Config, value: object) -> object:
    """The value itself; of `${key}`, what the configuration has there."""
    found = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return _value(config, found[1]) if found else value


def _value(config: Config, key: str) -> object:
    node: object = config.model_dump()
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else None
    return node["kind"] if isinstance(node, dict) and "kind" in node else node
