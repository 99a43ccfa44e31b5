"""Finished groups in a checkpoint: generated and scored, and not trained yet.

They are stored with tokens, log-probs, version spans and scores. Drawn again they would
be of another version of the policy, so a resumed run would not be the same, and their
generation would be paid for twice.

Invariant: what is read is what was written, in the same order. Few rows at a time are
in the driver's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from verl_ray.checkpoint.manifest import read_object, write_json
from verl_ray.cluster.waiting import put, read
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.batch import Batch, Int64, read_batch, write_batch
from verl_ray.data.buffer import Experience
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Rollouts, Scores

B = TypeVar("B", bound=Batch)

FOLDER = "groups"
"""Name of the folder in a checkpoint."""

_ROLLOUTS = "rollouts"
_SETTINGS = "settings.json"

_OF_RESPONSES = ("temperature", "max_response_tokens", "kv")
"""Settings of rollouts that a response depends on."""

_OF_SCORES = {
    "kind", "functions", "url", "model", "template", "verdict", "lowest", "highest",
    "temperature", "max_prompt_tokens", "max_response_tokens",
}  # fmt: skip
"""Settings of graders that a score depends on, where a grader has them."""

_ROWS_PER_FILE = 1024


def write_groups(folder: Path, groups: Experience, config: RLConfig) -> None:
    """Write finished groups to a folder of a checkpoint, which is created.

    Args:
        folder: The folder.
        groups: The groups.
        config: Configuration of the run that generated them.
    """
    stall_s = config.run.stall_s
    _write(folder / _ROLLOUTS, groups.rollouts, stall_s)
    for grader, scores in groups.scores.items():
        _write(folder / grader, scores, stall_s)
    write_json(folder / _SETTINGS, _settings_of(config))


@dataclass(frozen=True)
class StoredGroups:
    """Finished groups, and the settings that they were generated and scored with."""

    groups: Experience
    settings: Mapping[str, object] | None
    """None in a checkpoint of an earlier version, which does not say it."""


def read_groups(folder: Path) -> StoredGroups | None:
    """Read the finished groups of a folder of a checkpoint; None if there is none."""
    if not folder.is_dir():
        return None
    scores = {
        path.name: _read(path, Scores)
        for path in sorted(folder.iterdir())
        if path.name not in (_ROLLOUTS, _SETTINGS)
    }
    groups = Experience(_read(folder / _ROLLOUTS, Rollouts), scores)
    path = folder / _SETTINGS
    return StoredGroups(groups, read_object(path) if path.exists() else None)


def usable_groups(
    stored: StoredGroups, config: RLConfig, oldest_versions: Int64
) -> Experience:
    """Return the groups that a run with this configuration can learn from.

    They have as many rows as a group has now, and no token is too old for its batch.
    All of them were sampled and scored with the present settings.

    Args:
        stored: The groups of a checkpoint.
        config: Configuration of the run.
        oldest_versions: The oldest version that a token of each response may have,
            int64 [rows].
    """
    groups = stored.groups
    rollouts = groups.rollouts
    ordinals = rollouts.row("group_id")
    oldest = rollouts.row("oldest_version")
    is_old = (oldest >= 0) & (oldest < oldest_versions)

    _, group, sizes = np.unique(ordinals, return_inverse=True, return_counts=True)
    num_old = np.bincount(group, weights=is_old)
    is_usable = (sizes == config.rollout.group_size) & (num_old == 0)
    is_usable &= not changed_settings(stored, config)
    return groups.select(np.flatnonzero(is_usable[group]))


def changed_settings(stored: StoredGroups, config: RLConfig) -> list[str]:
    """Return the settings that differ from those of the groups; graders as a whole."""
    present = _settings_of(config)
    before = stored.settings
    if before is None:
        scores = stored.groups.scores
        return sorted(scores.keys() ^ config.graders.keys())
    return sorted(
        name
        for name in present.keys() | before.keys()
        if present.get(name) != before.get(name)
    )


def warn_of_unusable(
    stored: StoredGroups, usable: Experience, config: RLConfig, effect: str
) -> None:
    """Say on standard error how many responses cannot be used, and why; if any.

    Args:
        stored: The groups of a checkpoint.
        usable: Those that can be used.
        config: Configuration of the run.
        effect: What happens to the others, in words.
    """
    number = len(stored.groups.rollouts) - len(usable.rollouts)
    if not number:
        return
    # The others are too old for a smaller bound.
    reason = ", ".join(changed_settings(stored, config)) or "rollout.staleness"
    print(
        f"warning: {number} finished responses of the checkpoint {effect}, because of"
        f" another {reason}",
        file=sys.stderr,
        flush=True,
    )


def _settings_of(config: RLConfig) -> dict[str, object]:
    """Return the settings that responses and their scores depend on, as JSON."""
    settings: dict[str, object] = {
        f"rollout.{name}": getattr(config.rollout, name) for name in _OF_RESPONSES
    }
    # These choose the prompt that an ordinal stands for.
    curriculum = config.data.curriculum
    if curriculum.is_on:
        settings["data.curriculum"] = curriculum.model_dump(mode="json")
        settings["rollout.staleness"] = config.rollout.staleness
    for name, grader in config.graders.items():
        settings[name] = grader.model_dump(mode="json", include=_OF_SCORES)
    return settings


def _write(folder: Path, rows: Sharded[B], stall_s: float) -> None:
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, len(rows), _ROWS_PER_FILE)):
        part = rows.select(np.arange(start, min(start + _ROWS_PER_FILE, len(rows))))
        write_batch(folder / f"{number:05}.npz", read(part, stall_s))


def _read(folder: Path, stage: type[B]) -> Sharded[B]:
    files = sorted(folder.glob("*.npz"))
    return Sharded.concat([put(read_batch(file, stage)) for file in files])
