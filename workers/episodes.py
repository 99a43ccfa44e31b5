"""Episodes as rows: what a replica runs for each response, and the columns of its rows.

Invariant: the rows of an episode are adjacent, in the order of time, and its score
stands on the last of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_ray.agents.contract import (
    LIMITS,
    MOST_TURNS,
    End,
    Episode,
    EpisodeRow,
    Treatment,
)
from verl_ray.agents.tasks import tasks_of
from verl_ray.columns.batch import Ragged, offsets_of
from verl_ray.columns.seeds import row_seeds
from verl_ray.columns.stages import (
    NO_EPISODE,
    Finish,
    Prompts,
    Rollouts,
    prompt_columns,
    versions_of,
)
from verl_ray.rollout.episode_stream import EpisodeRequest
from workers.generation import TRAINING, Generation

ROW_IDS = MOST_TURNS
"""Row ids of an episode, which is at most one per turn: those from the number of its
trajectory times this one on.
"""


def episode_requests(
    prompts: Prompts, generation: Generation, prompt_of: Mapping[int, int]
) -> list[EpisodeRequest]:
    """Return the episodes of the responses `prompt_of`, by the ids of these."""
    numbers = np.array(list(prompt_of), np.int64)
    run_seed, purpose = generation.run_seed, generation.purpose
    seeds = row_seeds(run_seed, purpose, numbers).tolist()
    # Each seed is made of this word, so it stays as it is.
    environment_seeds = row_seeds(
        run_seed, f"{purpose}:world", prompts.group_id
    ).tolist()
    tasks = tasks_of(prompts)

    requests = []
    for (number, prompt), seed in zip(prompt_of.items(), seeds, strict=True):
        request = EpisodeRequest(
            number,
            tasks[prompt],
            seed,
            environment_seeds[prompt],
            generation.sampling_of(number),
            # The episodes of one prompt share its prefix.
            session=str(prompts.group_id[prompt]),
            trains=purpose == TRAINING,
        )
        requests.append(request)
    return requests


def episode_rollouts(
    prompts: Prompts,
    prompt_of: Mapping[int, int],
    episodes: Sequence[tuple[int, Episode]],
    treatments: Mapping[End, Treatment],
    routing_shape: tuple[int, int] | None = None,
) -> Rollouts:
    """Return the rows of episodes, one episode after another.

    One that is no member of its group has a single row, its prompt, which is aborted.

    Args:
        prompts: The prompts.
        prompt_of: The number of each episode's prompt, by the number of the episode.
        episodes: Number and episode.
        treatments: What becomes of an episode, by its end.
        routing_shape: As of a `RolloutEngine`.
    """
    numbered: list[tuple[int, Episode, EpisodeRow]] = []
    finishes: list[Finish] = []
    is_last: list[bool] = []
    row_ids: list[int] = []
    for number, episode in sorted(episodes, key=lambda pair: pair[0]):
        prompt = prompts.tokens[prompts.offsets[prompt_of[number]] :][
            : prompts.lengths[prompt_of[number]]
        ].tolist()
        nothing = [False] * len(prompt), [0.0] * len(prompt)
        rows = episode.rows
        finish = Finish.LENGTH if episode.end in LIMITS else Finish.STOP
        if treatments[episode.end] is Treatment.DROP or not rows:
            rows = [EpisodeRow(prompt, *nothing, [], [])]
            finish = Finish.ABORTED
        finishes += [finish] * len(rows)
        for index, row in enumerate(rows):
            numbered.append((number, episode, row))
            row_ids.append(number * ROW_IDS + index)
            is_last.append(index == len(rows) - 1)
    columns = _columns_of_rows(prompts, prompt_of, numbered, row_ids, finishes, is_last)
    if routing_shape is None:
        return columns
    experts = [
        np.zeros((len(row.tokens), *routing_shape), np.int16)
        if row.routed_experts is None
        else row.routed_experts
        for _, _, row in numbered
    ]
    return columns.replace(routed_experts=np.concatenate(experts))


def beside_episodes(singles: Rollouts) -> Rollouts:
    """Return single responses with the columns of episodes, of which they are none.

    Each has one turn, which was paid nothing.
    """
    num_rows = singles.num_rows
    nothing = Ragged.of_texts([""] * num_rows)
    has_turn = singles.response_length > 0
    turns = np.zeros((int(has_turn.sum()), 3))
    turns[:, 0] = singles.lengths[has_turn] - 1
    return singles.replace(
        row_id=singles.row_id * ROW_IDS,
        end=np.full(num_rows, NO_EPISODE, np.int8),
        end_detail=nothing,
        num_turns=np.ones(num_rows, np.int32),
        episode_score=np.zeros(num_rows, np.float32),
        episode_record=nothing,
        episode_metrics=nothing,
        turn_rewards=Ragged(turns, offsets_of(has_turn.astype(np.int64))),
    )


def _records_on_last_rows(
    episodes: Sequence[Episode], is_last: Sequence[bool]
) -> Ragged:
    """Return what is read of episodes as JSON, empty on all but their last rows.

    Args:
        episodes: The episode of each row.
        is_last: Whether it is the last row of its episode.
    """
    texts = [
        json.dumps(_record(episode)) if last else ""
        for episode, last in zip(episodes, is_last, strict=True)
    ]
    return Ragged.of_texts(texts)


def _record(episode: Episode) -> dict[str, Any]:
    """Return what is read of an episode; see `Rollouts`."""
    record: dict[str, Any] = {
        "conversations": episode.conversations,
        "response": episode.response,
    }
    if episode.output:
        record["output"] = _encodable(episode.output)
    return record


def _metrics_on_last_rows(
    episodes: Sequence[Episode], is_last: Sequence[bool], finishes: Sequence[Finish]
) -> Ragged:
    """Return what the environments have recorded as JSON; see `Rollouts`.

    An episode that is no member of its group says nothing of the policy.

    Args:
        episodes: The episode of each row.
        is_last: Whether it is the last row of its episode.
        finishes: Why it ended.
    """
    columns = zip(episodes, is_last, finishes, strict=True)
    texts = [
        json.dumps(episode.metrics)
        if last and episode.metrics and finish is not Finish.ABORTED
        else ""
        for episode, last, finish in columns
    ]
    return Ragged.of_texts(texts)


def _turns(row: EpisodeRow) -> npt.NDArray[np.float64]:
    """Return last token, reward and number of each turn of a row, [turns, 3]."""
    turns = [
        (token, reward, number)
        for (token, reward), number in zip(row.rewards, row.turns, strict=True)
    ]
    return np.array(turns, np.float64).reshape(-1, 3)


def _encodable(text: str) -> str:
    """Return a text without halves of characters, which a policy may have written."""
    return text.encode("utf-8", "replace").decode()


def _columns_of_rows(
    prompts: Prompts,
    prompt_of: Mapping[int, int],
    numbered: Sequence[tuple[int, Episode, EpisodeRow]],
    row_ids: Sequence[int],
    finishes: Sequence[Finish],
    is_last: Sequence[bool],
) -> Rollouts:
    """Return the rows of episodes as columns, one entry of each argument per row."""
    rows = [row for _, _, row in numbered]
    episodes = [episode for _, episode, _ in numbered]
    prompt_rows = prompts.select([prompt_of[number] for number, _, _ in numbered])
    offsets = offsets_of([len(row.tokens) for row in rows])
    mask = np.concatenate([np.array(row.mask, np.bool_) for row in rows])
    sampled = [np.flatnonzero(row.mask) for row in rows]
    spans = Ragged.of_rows(
        [np.array(row.versions, np.int64).reshape(-1, 2) for row in rows], np.int64
    )
    numbers = [list(End).index(episode.end) for episode in episodes]
    # Rewards may add up to what float32 does not hold, which is no score either.
    with np.errstate(over="ignore"):
        scores = np.array([episode.score for episode in episodes], np.float32)
    return Rollouts(
        offsets=offsets,
        tokens=np.concatenate([np.array(row.tokens, np.int32) for row in rows]),
        response_mask=mask,
        row_id=np.array(row_ids, np.int64),
        trajectory_id=np.array([number for number, _, _ in numbered], np.int64),
        prompt_length=np.array(
            [
                places[0] if len(places) else len(row.tokens)
                for places, row in zip(sampled, rows, strict=True)
            ],
            np.int32,
        ),
        response_length=np.array([len(places) for places in sampled], np.int32),
        finish=np.array(finishes, np.int8),
        rollout_log_probs=np.concatenate(
            [np.array(row.log_probs, np.float32) for row in rows]
        ),
        version_spans=spans,
        **versions_of(spans),
        **prompt_columns(prompt_rows),
        end=np.array(numbers, np.int8),
        end_detail=Ragged.of_texts([_encodable(each.detail) for each in episodes]),
        num_turns=np.array([episode.num_turns for episode in episodes], np.int32),
        episode_score=np.where(is_last, scores, np.float32(0)),
        episode_record=_records_on_last_rows(episodes, is_last),
        turn_rewards=Ragged.of_rows([_turns(row) for row in rows], np.float64),
        episode_metrics=_metrics_on_last_rows(episodes, is_last, finishes),
    )
