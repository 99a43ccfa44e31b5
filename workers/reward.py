"""Reward role: the contract of its workers, and texts scored by functions or a service.

Judges are in `judge.py`, models in `reward_model.py`.

Invariant: every row gets a score or a typed failure, never a silent 0.
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from verl_ray.agents.contract import FAULTS, End
from verl_ray.cluster.context import WorkerContext, steering
from verl_ray.columns.batch import Ragged
from verl_ray.columns.stages import (
    NO_EPISODE,
    Finish,
    Rollouts,
    Scores,
    last_rows,
    sums_of_trajectories,
)
from verl_ray.config.reward import FunctionReward, HttpReward
from verl_ray.data.prompts import prompt_text
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.rewards.health import (
    ENVIRONMENT_PREFIX,
    LARGEST,
    Score,
    ScoreHealth,
    entries_of,
    entries_text,
    score_of_number,
)
from verl_ray.rewards.pool import ScoringPool
from verl_ray.rewards.remote import RemoteScorer
from verl_ray.rewards.request import ScoreRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Grader(ABC):
    """One rank of one component of the reward role."""

    @abstractmethod
    def score(self, rows: Rollouts, step: int, is_held_out: bool = False) -> Scores:
        """Return a score for every row, or a typed failure of that row.

        It raises only where no row can be scored.

        Args:
            rows: The rows to score.
            step: The training step that is made; in an evaluation the last step of the
                policy.
            is_held_out: Whether it is an evaluation. Its scores also hold the answers
                that were read out of the responses, where the grader reads any.
        """

    def needs_groups(self) -> bool:
        """Return whether all responses to a prompt have to be scored in one call."""
        return False

    @steering
    def take_outage_s(self) -> float:
        """Return the seconds of outages that have ended since the last call.

        An outage is of a service that is asked for scores. It counts once, however many
        rows have waited. Graders that ask none have no outages.
        """
        return 0.0


Tokens = npt.NDArray[np.int32]


class TextGrader(Protocol):
    """Any scorer of texts: a pool of processes or a service."""

    @property
    def needs_groups(self) -> bool: ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]: ...

    def close(self) -> None: ...


class RewardWorker(Grader):
    """One rank that scores each response by a function or by a service.

    The function is that of the response's data source.
    """

    def __init__(
        self,
        context: WorkerContext,
        config: FunctionReward | HttpReward,
        policy_path: str,
    ) -> None:
        self._tokenizer = load_tokenizer(policy_path)
        self._taken_outage_s = 0.0
        self._grader: TextGrader
        if config.kind == "http":
            self._grader = RemoteScorer(config, context.role)
        else:
            self._grader = ScoringPool(
                config.functions,
                config.processes_per_rank,
                config.deadline_s,
                key=f"{context.role}.functions",
                max_failed_fraction=config.max_failed_fraction,
            )

    def score(self, rows: Rollouts, step: int, is_held_out: bool = False) -> Scores:
        """Return a score for each response, decoded without special tokens."""
        requests = requests_of(rows, step, self._tokenizer)
        if is_held_out:
            requests = [
                dataclasses.replace(request, is_held_out=True) for request in requests
            ]
        scores = scores_without_grader(rows)
        scored = [row for row in range(rows.num_rows) if row not in scores]
        replies = self._grader.score([requests[row] for row in scored])
        scores |= zip(scored, replies, strict=True)
        in_order = [scores[row] for row in range(rows.num_rows)]
        return scores_of(with_recorded_metrics(in_order, rows))

    def needs_groups(self) -> bool:
        """Return whether a function scores all responses to a prompt in one call."""
        return self._grader.needs_groups

    @steering
    def take_outage_s(self) -> float:
        """Return the seconds of the service's outages since the last call."""
        if not isinstance(self._grader, RemoteScorer):
            return 0.0
        # The sum only grows, in another thread.
        outage_s = self._grader.outage_s
        taken_s, self._taken_outage_s = self._taken_outage_s, outage_s
        return outage_s - taken_s

    def close(self) -> None:
        """Close the pool or the connections."""
        self._grader.close()


def scores_without_grader(rows: Rollouts) -> dict[int, Score]:
    """Return the scores of rows that no grader sees, by the number of the row.

    An episode is scored once, on its last row; a row that is not the last one adds
    nothing to the score. An episode that is no member of its group has no score: it has
    failed where its end is a fault, and is dropped otherwise. A single response is no
    episode.
    """
    if rows.end is None or rows.end_detail is None or rows.episode_score is None:
        return {}
    is_last = np.isin(np.arange(rows.num_rows), last_rows(rows.trajectory_id))
    ends = list(End)
    scores: dict[int, Score] = {}
    columns = zip(
        range(rows.num_rows),
        is_last.tolist(),
        rows.end.tolist(),
        rows.finish.tolist(),
        rows.end_detail.texts(),
        rows.episode_score.tolist(),
        strict=True,
    )
    for row, last, number, finish, detail, earned in columns:
        if number == NO_EPISODE:
            continue
        end = ends[number]
        if not last:
            scores[row] = Score(0.0, ScoreHealth.OK)
        elif finish == Finish.ABORTED and end not in FAULTS:
            scores[row] = Score(math.nan, ScoreHealth.DROPPED)
        elif finish == Finish.ABORTED:
            is_late = end.value.endswith("timeout")
            health = ScoreHealth.TIMEOUT if is_late else ScoreHealth.EXCEPTION
            scores[row] = Score(math.nan, health, f"{end}: {detail}".rstrip(": "))
        elif not abs(earned) <= LARGEST:
            scores[row] = score_of_number(
                earned, "the rewards of the episode add up to"
            )
    return scores


def with_recorded_metrics(scores: Sequence[Score], rows: Rollouts) -> list[Score]:
    """Return the scores of rows, with what environments have recorded as entries."""
    if rows.episode_metrics is None:
        return list(scores)
    columns = zip(
        scores, rows.episode_metrics.texts(), rows.data_source.texts(), strict=True
    )
    with_metrics = []
    for score, text, source in columns:
        recorded = json.loads(text).items() if text else ()
        metrics = {
            f"{ENVIRONMENT_PREFIX}{source}/{name}": value for name, value in recorded
        }
        entries = entries_text({**entries_of(score.entries), **metrics})
        with_metrics.append(dataclasses.replace(score, entries=entries))
    return with_metrics


def requests_of(
    rows: Rollouts, step: int, tokenizer: PreTrainedTokenizerBase
) -> list[ScoreRequest]:
    """Return a request to score each row, as texts.

    Prompts are as the data set has them; responses have no special tokens.
    """
    # Columns are decoded as a whole, once.
    columns = zip(
        response_tokens(rows),
        rows.answer.texts(),
        rows.has_answer.tolist(),
        rows.messages.texts(),
        rows.data_source.texts(),
        rows.extra.texts(),
        rows.finish.tolist(),
        rows.group_id.tolist(),
        strict=True,
    )
    requests = []
    for column in columns:
        tokens, answer, has_answer, messages, source, extra, finish, group = column
        request = ScoreRequest(
            response=_text(tokens, tokenizer),
            answer=answer if has_answer else None,
            prompt=prompt_text(messages),
            data_source=source,
            extra=json.loads(extra),
            num_tokens=len(tokens),
            finish_reason=Finish(finish).name.lower(),
            step=step,
            group=group,
            tokens=tokens.tolist(),
            conversation=json.loads(messages),
        )
        requests.append(request)
    return requests if rows.end is None else _of_episodes(rows, requests)


def _of_episodes(rows: Rollouts, requests: list[ScoreRequest]) -> list[ScoreRequest]:
    """Return requests about rows as requests about the episodes that end there.

    Those about single responses stay as they are.

    The response is the policy's last turn.
    """
    assert rows.end is not None and rows.episode_score is not None
    assert rows.episode_record is not None and rows.turn_rewards is not None
    texts = rows.episode_record.texts()
    lasts = last_rows(rows.trajectory_id)
    lengths = sums_of_trajectories(rows.trajectory_id, rows.response_length)
    episode_requests = list(requests)
    for row, length in zip(lasts.tolist(), lengths.tolist(), strict=True):
        if rows.end[row] == NO_EPISODE:
            continue
        record = json.loads(texts[row])
        episode_requests[row] = dataclasses.replace(
            requests[row],
            response=record["response"],
            num_tokens=length,
            tokens=requests[row].tokens[_first_of_last_turn(rows, row) :],
            episode_score=float(rows.episode_score[row]),
            episode_end=list(End)[rows.end[row]].value,
            episode_conversations=record["conversations"],
            episode_output=record.get("output", ""),
        )
    return episode_requests


def _first_of_last_turn(rows: Rollouts, row: int) -> int:
    """Return the place of the first token of a row's last turn among its response."""
    assert rows.turn_rewards is not None
    start, end = rows.turn_rewards.offsets[row : row + 2].tolist()
    if end - start < 2:
        return 0
    last_of_former = int(rows.turn_rewards.values[end - 2, 0])
    first = rows.offsets[row]
    return int(rows.response_mask[first : first + last_of_former + 1].sum())


def response_texts(rows: Rollouts, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return each row's response tokens as text, without special tokens."""
    return [_text(tokens, tokenizer) for tokens in response_tokens(rows)]


def response_tokens(rows: Rollouts) -> list[Tokens]:
    """Return each row's response tokens, int32 [tokens]."""
    ends = np.cumsum(rows.response_length)
    # Behind the last end there is one more part, which is empty.
    return np.split(rows.tokens[rows.response_mask], ends)[:-1]


def _text(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def scores_of(scored: Sequence[Score]) -> Scores:
    """Return one score per row, as columns."""
    return Scores(
        offsets=np.zeros(len(scored) + 1, np.int64),
        score=np.array([score.value for score in scored], np.float32),
        health=np.array([score.health for score in scored], np.int8),
        detail=Ragged.of_texts([score.detail for score in scored]),
        rescored=np.array([score.rescored for score in scored], np.bool_),
        has_entries=np.array([bool(score.entries) for score in scored], np.bool_),
        entries=Ragged.of_texts([score.entries for score in scored]),
    )
