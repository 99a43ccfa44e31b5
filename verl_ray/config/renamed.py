"""Keys that were called otherwise in earlier versions, and keys that these did not have.

Invariant: every key that is named here as a present one exists. Deliberately not here: keys that were never there, for
which a near spelling is found (`suggest.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

RENAMED = {
    "run.call_deadline_s": "run.stall_s",
    "run.start_deadline_s": "run.stall_s",
    "rollout.health.stall_s": "run.stall_s",
}
"""The old key, and the one that says it now. Of several that became one, the first is the one whose value it takes."""


ADDED: dict[str, Any] = {"rollout.staleness": 0}
"""A key that earlier versions did not have, and the value of what they did."""


def new_name(key: str) -> str | None:
    """One sentence that leads from an old key to the present one; None for a key that was never there."""
    now = RENAMED.get(key)
    return None if now is None else f"{key} is now {now}."


def renewed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that an earlier version has saved, as a plain tree under the present keys."""
    made = copy.deepcopy(dict(tree))
    for old, now in RENAMED.items():
        section, _, name = old.rpartition(".")
        holder = _section(made, section)
        if holder is not None and name in holder:
            value = holder.pop(name)
            target, _, new = now.rpartition(".")
            there = _section(made, target)
            if there is not None:
                there.setdefault(new, value)
    for key, value in ADDED.items():
        section, _, name = key.rpartition(".")
        holder = _section(made, section)
        if holder is not None:
            holder.setdefault(name, value)
    return made


def _section(tree: dict[str, Any], key: str) -> dict[str, Any] | None:
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else None
