"""Finished groups that are stored: in a checkpoint, to be trained, or to be replayed.

A checkpoint holds groups that are generated and scored, and not trained yet, with
tokens, log-probs, version spans and scores. Drawn again they would be of another
version of the policy, so a resumed run would not be the same, and their generation
would be paid for twice.

A group whose scores are all equal has no advantage under a group baseline. Dynamic
sampling draws another one for it; replay takes one of an earlier step, whose scores
differ, as TRL's replay buffer does. It costs no generation, and its tokens are older.

Invariant: what is read is what was written, in the same order. Few rows at a time are
in the driver's memory. What is replayed follows from the scores of the batches in their
order alone. A group is replayed once, so it is learned from twice at most, and never
with tokens that are more than algorithm.replay_age versions old.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from controllers.rollouts.dynamic_sampling import with_spread
from verl_ray.checkpoint.manifest import read_object, write_json
from verl_ray.cluster.waiting import put, read
from verl_ray.columns.batch import Batch, Int64, Ragged, read_batch, write_batch
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Rollouts, Scores
from verl_ray.config.renamed import migrated
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.learning.credit import says_something
from verl_ray.rewards.shaping import Shaping, response_scores

# ---------------------------------------------------------------------- in a checkpoint

B = TypeVar("B", bound=Batch)

FOLDER = "groups"
"""Name of the folder in a checkpoint."""

_ROLLOUTS = "rollouts"
_SETTINGS = "settings.json"

_RESPONSE_SETTINGS = ("temperature", "max_response_tokens", "kv")
"""Settings of rollouts that a response depends on."""

_PROCESS_SETTINGS = {
    "model_timeout_s", "tool_timeout_s", "turn_timeout_s", "episode_timeout_s",
    "processes_per_replica", "episodes_per_process", "process_memory_gib",
    "max_retries",
}  # fmt: skip
"""Settings of episodes that a finished one does not depend on."""

_SCORE_SETTINGS = {
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
    settings = _renewed_settings(read_object(path)) if path.exists() else None
    return StoredGroups(groups, settings)


def usable_groups(
    stored: StoredGroups, config: RLConfig, oldest_versions: Int64
) -> Experience:
    """Return the groups that a run with this configuration can learn from.

    They have as many trajectories as a group has now, and no token is too old for its
    batch. All of them were sampled and scored with the present settings.

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

    groups_here, group = np.unique(ordinals, return_inverse=True)
    _, first_rows = np.unique(rollouts.row("trajectory_id"), return_index=True)
    sizes = np.bincount(group[first_rows], minlength=len(groups_here))
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
    parts = (stored.groups, usable)
    before, here = (len(part.of_trajectories().rollouts) for part in parts)
    number = before - here
    if not number:
        return
    # The others are too old for a smaller bound, or their groups are of another size.
    reason = (
        ", ".join(changed_settings(stored, config))
        or "rollout.staleness or rollout.group_size"
    )
    print(
        f"warning: {number} finished responses of the checkpoint {effect}, because of"
        f" another {reason}",
        file=sys.stderr,
        flush=True,
    )


def _settings_of(config: RLConfig) -> dict[str, object]:
    """Return the settings that responses and their scores depend on, as JSON."""
    settings: dict[str, object] = {
        f"rollout.{name}": getattr(config.rollout, name) for name in _RESPONSE_SETTINGS
    }
    # Checkpoints of earlier versions do not name these.
    if config.rollout.stop:
        settings["rollout.stop"] = config.rollout.stop
    # Rows have another column with it.
    if config.rollout.routing_replay:
        settings["rollout.routing_replay"] = True
    # These choose the prompt that an ordinal stands for.
    curriculum = config.data.curriculum
    if curriculum.is_on:
        settings["data.curriculum"] = curriculum.model_dump(mode="json")
        settings["rollout.staleness"] = config.rollout.staleness
    if config.episodes is not None:
        settings["agent"] = config.agent.model_dump(
            mode="json", exclude=_PROCESS_SETTINGS
        )
    for name, grader in config.graders.items():
        settings[name] = grader.model_dump(mode="json", include=_SCORE_SETTINGS)
    return settings


def _write(folder: Path, rows: Sharded[B], stall_s: float) -> None:
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, len(rows), _ROWS_PER_FILE)):
        part = rows.select(np.arange(start, min(start + _ROWS_PER_FILE, len(rows))))
        write_batch(folder / f"{number:05}.npz", read(part, stall_s))


def _read(folder: Path, stage: type[B]) -> Sharded[B]:
    files = sorted(folder.glob("*.npz"))
    return Sharded.concat(
        [put(read_batch(file, stage, _renewed_columns)) for file in files]
    )


def _renewed_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a batch as the present version writes them.

    Earlier versions stored of an episode one conversation, and no metrics.
    """
    if "episode_messages" not in columns:
        return columns
    records = columns.pop("episode_messages").texts()
    columns["episode_record"] = Ragged.of_texts(map(_renewed_record, records))
    columns.setdefault("episode_metrics", Ragged.of_texts([""] * len(records)))
    return columns


def _renewed_record(text: str) -> str:
    """Return the record of an episode from the messages of its last conversation."""
    if not text:
        return text
    messages = json.loads(text)
    own = [each for each in messages if each["role"] == "assistant"]
    record = {
        "conversations": [messages] if messages else [],
        "response": (own[-1].get("content") or "") if own else "",
    }
    return json.dumps(record)


def _renewed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return stored settings with those of episodes that were added since."""
    if "agent" not in settings:
        return settings
    agent = migrated({"agent": settings["agent"]})["agent"]
    own = {
        name: value for name, value in agent.items() if name not in _PROCESS_SETTINGS
    }
    return {**settings, "agent": own}


# ------------------------------------------------------------------------------- replay

REPLAY_FOLDER = "replay"
"""Name of the folder in a checkpoint."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """A batch in which groups of earlier steps take the place of others.

    Attributes:
        groups: The rows to learn from, in the order of their ids.
        replaced: Ordinals of groups that are not in it, ascending, int64.
        replayed: Ordinals of the groups in their place, int64.
    """

    groups: Experience
    replaced: Int64
    replayed: Int64


class Replay:
    """Groups of earlier steps that may be learned from once more.

    Attributes:
        groups: Their rows; None for no group.
    """

    def __init__(self, config: RLConfig) -> None:
        """Begin without groups."""
        assert config.algorithm.replay is not None
        self._size = config.algorithm.replay
        assert config.algorithm.replay_age is not None
        self._oldest_age = config.algorithm.replay_age
        self._config = config
        self._shaping = Shaping(config)
        self.groups: Experience | None = None

    def exchange(self, batch: Experience, version: int) -> Exchange:
        """Exchange the groups of a batch whose scores are all equal, as far as it goes.

        Args:
            batch: Whole groups.
            version: Version of the policy that learns.
        """
        responses = batch.of_trajectories()
        group_id = responses.rollouts.row("group_id")
        scores = self._shaping.weigh(response_scores(responses.scores))
        finish = responses.rollouts.row("finish")
        teaches = with_spread(self._config, group_id, scores, finish)
        lacking = np.unique(group_id[~teaches])

        # A resumed run may have a smaller bound.
        stored = self._of_age(self.groups, version)
        ranked = self._by_spread(stored)
        replayed = np.sort(ranked[: len(lacking)])
        replaced = lacking[: len(replayed)]

        remaining = np.setdiff1d(ranked, replayed)
        # Nobody knows the age of a version that no step may learn from any more.
        candidates = self._of_age(
            _joined([_without(batch, lacking), _only(stored, remaining)]), version + 1
        )
        self.groups = _only(candidates, self._by_spread(candidates)[: self._size])

        groups = _joined([_without(batch, replaced), _only(stored, replayed)])
        assert groups is not None, "a batch keeps its size"
        return Exchange(groups, replaced, replayed)

    def read(self, checkpoint: Path) -> None:
        """Take back the groups of a checkpoint."""
        stored = read_groups(checkpoint / REPLAY_FOLDER)
        self.groups = None
        if stored is None:
            return
        # Their age is looked at before they are replayed.
        any_version = np.zeros(len(stored.groups.rollouts), np.int64)
        usable = usable_groups(stored, self._config, any_version)
        warn_of_unusable(stored, usable, self._config, "are not replayed")
        if len(usable.rollouts):
            self.groups = usable

    def _of_age(self, groups: Experience | None, version: int) -> Experience | None:
        """Return the groups that are not too old for this version."""
        if groups is None:
            return None
        rollouts = groups.rollouts
        oldest = rollouts.row("oldest_version")
        # A row without response tokens has no version.
        is_old = (oldest >= 0) & (version - oldest > self._oldest_age)
        return _without(groups, np.unique(rollouts.row("group_id")[is_old]))

    def _by_spread(self, groups: Experience | None) -> Int64:
        """Return ordinals by the standard deviation of their scores, the largest first.

        Of equal ones the newest comes first.
        """
        if groups is None:
            return np.empty(0, np.int64)
        responses = groups.of_trajectories()
        scores = self._shaping.weigh(response_scores(responses.scores))
        group_id = responses.rollouts.row("group_id")
        ordinals, group = np.unique(group_id, return_inverse=True)

        finish = responses.rollouts.row("finish")
        is_member = scores.ok & says_something(self._config.algorithm, finish)
        group, score = group[is_member], scores.score[is_member].astype(np.float64)
        counts = np.maximum(np.bincount(group, minlength=len(ordinals)), 1)
        mean = np.bincount(group, score, len(ordinals)) / counts
        squares = np.bincount(group, (score - mean[group]) ** 2, len(ordinals))
        order = np.lexsort((-ordinals, -squares / counts))
        ranked: Int64 = ordinals[order]
        return ranked


def _only(groups: Experience | None, ordinals: Int64) -> Experience | None:
    """Return the groups with these ordinals; None for no row."""
    if groups is None:
        return None
    rows = np.flatnonzero(np.isin(groups.rollouts.row("group_id"), ordinals))
    return groups.select(rows) if len(rows) else None


def _without(groups: Experience, ordinals: Int64) -> Experience | None:
    """Return the groups but for those with these ordinals; None for no row."""
    return _only(groups, np.setdiff1d(groups.rollouts.row("group_id"), ordinals))


def _joined(parts: Sequence[Experience | None]) -> Experience | None:
    """Return the rows of all parts in the order of their ids; None for no row."""
    joined = Experience.concat([part for part in parts if part is not None])
    if joined is None:
        return None
    order = np.argsort(joined.rollouts.row("row_id"), kind="stable")
    return joined.select(order)
