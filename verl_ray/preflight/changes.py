"""Settings that may differ between a checkpoint and the run that continues from it.

Invariant: the meaning of the saved state does not change: its data cursor, its random
streams, its parameters and the roles that they belong to. Every other setting may
change, and the change is shown. The path of the training data is such a setting: the
cursor compares the records themselves (`verl_ray/data/cursor.py`). So is the size of a
step where no step learns from what an earlier one has drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from verl_ray.preflight.resolve import may_be_auto

_ROWS = "the data cursor counts the rows that it leads to"
_STEP = (
    "the steps that are done were made of it; only a synchronous run of reinforcement"
    " learning without replay may change it"
)
_STEP_OF_EPOCHS = (
    "run.total_epochs counts steps of one size; give the length by run.total_steps"
)
_MODEL = "the saved parameters are those of this model"
_OPTIMIZER = "the saved state is that of this optimizer"
_ADAPTER = (
    "the saved parameters are those of an adapter of this shape, or of a model"
    " without one"
)

FIXED: tuple[tuple[str, str], ...] = (
    ("task", "the state is that of another kind of run"),
    ("run.seed", "data order, sampling and new parameters follow from it"),
    ("data.columns*", _ROWS),
    ("data.overlong", _ROWS),
    ("data.shuffle", _ROWS),
    ("data.apply_chat_template", _ROWS),
    ("data.chat_template", _ROWS),
    ("data.chat_template_kwargs*", _ROWS),
    ("data.template_day", _ROWS),
    ("data.max_prompt_tokens", _ROWS),
    ("data.prompts_per_step", _STEP),
    ("data.unusable", _ROWS),
    ("sft.max_tokens", _ROWS),
    ("sft.batch_size", _STEP),
    ("preference.max_tokens", _ROWS),
    ("preference.batch_size", _STEP),
    ("rollout.group_size", _STEP),
    ("*.mini_batch_size", _STEP),
    ("*.epochs", _STEP),
    ("model.path", _MODEL),
    ("*.model.path", _MODEL),
    ("model.revision", _MODEL),
    ("*.model.revision", _MODEL),
    ("model.trust_remote_code", _MODEL),
    ("*.model.trust_remote_code", _MODEL),
    ("*.lora.*", _ADAPTER),
    ("*.optimizer.kind", _OPTIMIZER),
    ("algorithm.advantage", "it decides what the learned roles mean"),
    # The whole section, which is set or null.
    ("algorithm.value_loss", "the critic would appear or vanish"),
    ("algorithm.kl.controller", "its state is saved"),
    (
        "distill.average_decay",
        "the saved state has the average of the weights, or none",
    ),
    ("prepare", "the run made its inputs by it"),
    ("prepare.max_operand", "the run made its inputs by it"),
    ("prepare.num_*", "the run made its inputs by it"),
    ("prepare.model.*", "the run made its inputs by it"),
    ("prepare.warm_start*", "the run made its inputs by it"),
)
"""Settings that may not change: key (* stands for anything), reason."""

STEP_SIZES = ("rollout.group_size", "data.prompts_per_step", "*.mini_batch_size")
"""The settings among them that may change from one step to the next where each step
learns from its own groups alone."""

_NO_CHANGES = ("run.resume", "run.resolved", "run.paces", "run.total_epochs")
"""Settings that are written by a run, or that say nothing of what it does."""

FOLLOWING: tuple[tuple[str, str], ...] = (
    ("model.path", "*.model.path"),
    ("model.revision", "*.model.revision"),
    ("actor.num_ranks", "*.num_ranks"),
    ("actor.mini_batch_size", "critic.mini_batch_size"),
    ("actor.epochs", "critic.epochs"),
)
"""Key, and the keys that have its value unless they are set themselves."""


MEASURED: tuple[str, ...] = ("task", "{role}.model.*", "{role}.lora*", "prepare.model*")
"""Settings that a measurement of a checkpoint's `role` may not change."""


@dataclass(frozen=True)
class Change:
    """A setting that differs from the checkpoint's."""

    key: str

    saved: object
    """Value in the checkpoint."""

    now: object
    """Value in this run."""

    refused: str | None
    """Reason why the setting may not change; None if it may."""

    def __str__(self) -> str:
        text = f"{self.key}: {self.saved!r} -> {self.now!r}"
        if self.refused is None:
            return text
        return f"{text} ({self.refused})"


def changed_keys(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[Change], list[Change]]:
    """Return the settings that changed since a checkpoint was written.

    A change that other keys follow is reported once, under the key that they follow.
    Paths below run.dir are compared relative to it, so that a run's folder can be
    moved. A setting that is `auto` on one side is left to the run, so it did not
    change, and neither did the number of steps where run.total_epochs counts them.
    Where a run begins (run.resume), what was auto (run.resolved) and where schedules
    are (run.paces) are no settings of what it does.

    Args:
        saved: Configuration of the checkpoint, as a plain tree.
        now: Configuration of this run, as a plain tree.

    Returns:
        The allowed changes and the refused ones.
    """
    allowed = []
    refused = []

    # Either side has a run.dir of its own.
    saved_tree = _below_run_dir(saved, saved)
    tree = _below_run_dir(now, now)
    stand_alone = _steps_stand_alone(saved) and _steps_stand_alone(now)
    differences = list(_differences(saved_tree, tree))
    values = {key: (before, after) for key, before, after in differences}
    for key, before, after in differences:
        if _follows(key, values):
            continue

        reason = _reason_to_refuse(key, before, after)
        if _adds_or_drops_momentum(key, before, after, saved):
            reason = _OPTIMIZER
        change = Change(key, before, after, reason)
        if stand_alone and any(fnmatchcase(key, each) for each in STEP_SIZES):
            is_counted = key == "data.prompts_per_step" and now["run"].get(
                "total_epochs"
            )
            change = replace(change, refused=_STEP_OF_EPOCHS if is_counted else None)
        if change.refused is None:
            allowed.append(change)
        else:
            refused.append(change)
    return allowed, refused


def _steps_stand_alone(tree: Mapping[str, Any]) -> bool:
    """Return whether each step of a run learns from groups that it draws itself."""
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, Mapping) or algorithm.get("replay") is not None:
        return False
    return bool(tree.get("rollout", {}).get("staleness") == 0)


def changed_model(
    saved: Mapping[str, Any], now: Mapping[str, Any], role: str
) -> list[Change]:
    """Return the settings that make the model of a role another than a checkpoint's.

    Nothing else hinders its measurement: not the data, the algorithm or the seed that
    it was trained by. A path counts as the same if it is so as it is written, or
    relative to the run.dir of either side.

    Args:
        saved: Configuration of the checkpoint, as a plain tree.
        now: Configuration of the measurement, as a plain tree.
        role: The role that is measured.
    """
    moved = _differences(_below_run_dir(saved, saved), _below_run_dir(now, now))
    keys_moved = {key for key, _, _ in moved}
    patterns = [pattern.format(role=role) for pattern in MEASURED]
    return [
        Change(key, before, after, _reason_to_refuse(key) or _MODEL)
        for key, before, after in _differences(saved, now)
        if key in keys_moved and any(fnmatchcase(key, each) for each in patterns)
    ]


def _follows(key: str, changes: Mapping[str, tuple[object, object]]) -> bool:
    """Return whether a key changed as another one did, which it has its value from."""
    return any(
        fnmatchcase(key, pattern) and changes.get(leader) == changes[key]
        for leader, pattern in FOLLOWING
        if key != leader
    )


def _reason_to_refuse(key: str, *values: object) -> str | None:
    """Return why a setting may not change; None if it may.

    Args:
        key: The setting, or a section that one side lacks.
        values: Its values on both sides.
    """
    sections = [value for value in values if isinstance(value, Mapping)]
    for pattern, reason in FIXED:
        section, _, name = pattern.rpartition(".")
        sets = key == section and any(each.get(name) is not None for each in sections)
        if sets or fnmatchcase(key, pattern):
            return reason
    return None


def _adds_or_drops_momentum(
    key: str, before: object, after: object, saved: Mapping[str, Any]
) -> bool:
    """Return whether a change gives SGD a state or takes it; Muon always has one."""
    section, _, name = key.rpartition(".")
    if name != "momentum" or not section.endswith(".optimizer"):
        return False
    optimizer: Any = saved
    for part in section.split("."):
        optimizer = optimizer[part]
    return optimizer["kind"] == "sgd" and 0 in (before, after)


def _differences(
    saved: Any, now: Any, prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield key and values of the smallest parts that differ.

    A section that only one side has is a single difference.
    """
    # What run.total_epochs becomes is compared as run.total_steps.
    if saved == now or prefix in _NO_CHANGES:
        return
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        # A section that one side lacks is compared with None.
        for key in saved.keys() | now.keys():
            path = f"{prefix}.{key}" if prefix else key
            yield from _differences(saved.get(key), now.get(key), path)
        return

    is_left_to_the_run = "auto" in (saved, now) and may_be_auto(prefix)
    if prefix == "run.total_steps":
        is_left_to_the_run = None in (saved, now)
    if not is_left_to_the_run:
        yield prefix, saved, now


def _below_run_dir(tree: Any, root: Mapping[str, Any]) -> Any:
    """Return a tree in which paths below run.dir are relative to it."""
    if isinstance(tree, Mapping):
        return {key: _below_run_dir(value, root) for key, value in tree.items()}

    folder = root["run"]["dir"].rstrip("/") + "/"
    if isinstance(tree, str) and tree.startswith(folder):
        return "{run.dir}/" + tree.removeprefix(folder)
    return tree
