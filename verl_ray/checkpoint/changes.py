"""Which settings may differ between a checkpoint and the run that goes on from it.

Invariant: what the saved state means does not change under it: its data cursor, its random streams, its parameters
and the roles they belong to. Everything else may change, and is shown. Deliberately not here: rules within one
configuration (`verl_ray/config/rules`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from verl_ray.config.resolve import AUTO_KEYS

_ROWS = "the data cursor counts the rows that it leads to"
_STEP = "the steps that are done were made of it, and so is the length of the schedule"
_MODEL = "the saved parameters are those of this model"
_ADAPTER = "the saved parameters are those of an adapter of this shape, or of a model without one"

FIXED: tuple[tuple[str, str], ...] = (
    ("task", "the state is that of another kind of run"),
    ("run.seed", "data order, sampling and new parameters follow from it"),
    ("data.train_path", _ROWS),
    ("data.overlong", _ROWS),
    ("data.shuffle", _ROWS),
    ("data.apply_chat_template", _ROWS),
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
    ("*.lora.*", _ADAPTER),
    ("algorithm.advantage", "it decides what the learned roles mean"),
    ("algorithm.value_loss", "the critic would appear or vanish"),  # the whole section, set or null
    ("algorithm.kl.controller", "its state is saved"),
    ("prepare", "the run made its inputs by it"),
    ("prepare.max_operand", "the run made its inputs by it"),
    ("prepare.num_*", "the run made its inputs by it"),
    ("prepare.model.*", "the run made its inputs by it"),
    ("prepare.warm_start*", "the run made its inputs by it"),
)
"""(key, where * stands for anything; why it stays)."""


@dataclass(frozen=True)
class Change:
    """One key that differs, and why it may not (None: it may)."""

    key: str
    saved: object
    now: object
    refused: str | None

    def __str__(self) -> str:
        text = f"{self.key}: {self.saved!r} -> {self.now!r}"
        return text if self.refused is None else f"{text} ({self.refused})"


def changed_keys(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[Change], list[Change]]:
    """(allowed, refused) changes from the configuration of a checkpoint to that of this run, both as plain trees.

    Paths below run.dir are compared from there, so that a run's folder can be moved. Where one side says `auto`, the
    user has left it to the run, so nothing was changed; and where a run begins is no setting of what it does.
    """
    changes = [
        Change(key, before, after, next((why for pattern, why in FIXED if fnmatchcase(key, pattern)), None))
        for key, before, after in _differences(_below_run_dir(saved, saved), _below_run_dir(now, now))
    ]
    return [c for c in changes if c.refused is None], [c for c in changes if c.refused is not None]


def _differences(saved: Any, now: Any, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Keys of the smallest parts that differ. A section that only one side has is one difference."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in saved.keys() | now.keys():
            yield from _differences(saved.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
    elif saved != now and prefix != "run.resume" and not (prefix in AUTO_KEYS and "auto" in (saved, now)):
        yield prefix, saved, now


def _below_run_dir(tree: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _below_run_dir(value, root) for key, value in tree.items()}
    folder = root["run"]["dir"].rstrip("/") + "/"
    if isinstance(tree, str) and tree.startswith(folder):
        return "{run.dir}/" + tree.removeprefix(folder)
    return tree
