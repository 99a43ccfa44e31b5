"""Groups of prompts that ended the replicas which generated for them.

Invariant: such a group has aborted responses without tokens and without scores. So a
batch keeps its size, nothing is learned from the group, and a held-out problem counts
as one without a score.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

import numpy as np

from verl_ray.agents.contract import End, Episode
from verl_ray.agents.tasks import environments_of
from verl_ray.cluster.waiting import put, read
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Finish, Prompts
from verl_ray.config.agent import AgentConfig
from verl_ray.data.buffer import Experience
from verl_ray.data.prompts import prompt_text
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rollout.requests import Chunk
from workers.episodes import beside_episodes, episode_rollouts
from workers.reward import scores_of
from workers.rollout import (
    whole_rollouts,
)

ENDS_REPLICAS = "replicas were lost twice with its rows, the last time with no others"
"""Why a prompt is given up, also in the ledger."""

_SHOWN = 80  # characters of a prompt in the warning


def aborted_group(
    stored: Sharded[Prompts],
    group_size: int,
    graders: Iterable[str],
    *,
    purpose: str,
    stall_s: float,
    agent: AgentConfig | None = None,
) -> Experience:
    """Return the aborted responses to a prompt, and warn of it.

    Args:
        stored: The prompt, one row.
        group_size: Number of its responses.
        graders: What would have scored them.
        purpose: Their purpose.
        stall_s: Limit in seconds of reading the prompt.
        agent: The environments of episodes; None where responses are single ones.
    """
    prompts = read(stored, stall_s)
    (ordinal,) = prompts.group_id.tolist()
    (messages,) = prompts.messages.texts()
    (source,) = prompts.data_source.texts()
    print(
        f"warning: prompt {ordinal} ({purpose}, {source}) is given up:"
        f" {ENDS_REPLICAS}. It begins with {prompt_text(messages)[:_SHOWN]!r}",
        file=sys.stderr,
        flush=True,
    )

    first_row = ordinal * group_size
    rows = range(first_row, first_row + group_size)
    failed_episode = Episode([], End.ENVIRONMENT_FAILED, 0.0, ENDS_REPLICAS)
    chunks = [
        Chunk(
            request_id=row,
            tokens=np.empty(0, np.int32),
            log_probs=np.empty(0, np.float32),
            finish=Finish.ABORTED,
            first_token=0,
            version_spans=(),
        )
        for row in rows
    ]
    prompt_of = dict.fromkeys(rows, 0)
    if agent is None:
        rollouts = put(whole_rollouts(prompts, prompt_of, chunks))
    elif environments_of(prompts, agent.environments) == [None]:
        rollouts = put(beside_episodes(whole_rollouts(prompts, prompt_of, chunks)))
    else:
        episodes = [(row, failed_episode) for row in rows]
        rollouts = put(episode_rollouts(prompts, prompt_of, episodes, agent.treatments))
    failed = Score(math.nan, ScoreHealth.EXCEPTION, ENDS_REPLICAS)
    scores = {name: put(scores_of([failed] * group_size)) for name in graders}
    return Experience(rollouts, scores)
