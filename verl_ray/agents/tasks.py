"""Records of a data set as tasks of episodes.

Invariant: a task has what the record has, and nothing is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from verl_ray.agents.contract import EpisodeTask
from verl_ray.data.fields import environment_of

if TYPE_CHECKING:
    from verl_ray.columns.stages import Prompts, Rollouts


def tasks_of(prompts: Prompts) -> list[EpisodeTask]:
    """Return the task of each prompt."""
    arguments_of = prompts.template_arguments
    columns = zip(
        prompts.messages.texts(),
        prompts.answer.texts(),
        prompts.has_answer.tolist(),
        prompts.extra.texts(),
        prompts.data_source.texts(),
        ["{}"] * prompts.num_rows if arguments_of is None else arguments_of.texts(),
        strict=True,
    )
    return [
        EpisodeTask(
            as_messages(json.loads(messages)),
            answer if has_answer else None,
            json.loads(extra),
            source,
            json.loads(arguments),
        )
        for messages, answer, has_answer, extra, source, arguments in columns
    ]


def environments_of(
    rows: Prompts | Rollouts, names: Collection[str]
) -> list[str | None]:
    """Return the environment of each row; see `environment_of`."""
    columns = zip(rows.extra.texts(), rows.data_source.texts(), strict=True)
    return [
        environment_of(json.loads(extra), source, names) for extra, source in columns
    ]


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a prompt as messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt
