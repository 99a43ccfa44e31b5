"""Stages a row passes through: one frozen batch type each, one comment per column.

Invariant: rows of different stages that belong together stand in the same order. Token
t of a row holds what is known about token t itself: `log_probs[t]` is the
log-probability of token t given those before it, and `values[t]` is the value before
token t is taken.

Example: one prompt, "1+2=", with two responses, "3" and "12". The tokenizer has one
token per character: "0" to "9" are 2 to 11, "+" is 12, "=" is 13, and 1 ends a
response. Some columns of the main stages, with a `|` between the rows::

    Prompts       offsets            [0, 4]
                  group_id           [7]
                  tokens             [3, 12, 4, 13]

    Rollouts      offsets            [0, 6, 13]
                  row_id             [14 | 15]
                  group_id           [7 | 7]
                  prompt_length      [4 | 4]
                  response_length    [2 | 3]
                  tokens             [3, 12, 4, 13, 5, 1 | 3, 12, 4, 13, 3, 4, 1]
                  response_mask      [F, F, F, F, T, T | F, F, F, F, T, T, T]
                  rollout_log_probs  [0, 0, 0, 0, -0.5, -0.25
                                      | 0, 0, 0, 0, -1.5, -1, -0.25]

    Scores        offsets            [0, 0, 0]
                  score              [1 | 0]

    LogProbs      offsets            [0, 6, 13]
                  log_probs          [0, 0, 0, 0, -0.5, -0.25
                                      | 0, 0, 0, 0, -1.5, -1, -0.25]

    RowRewards    offsets            [0, 0, 0]
                  reward             [1 | 0]
                  advantage          [0.5 | -0.5]
                  in_loss            [T | T]
                  is_member          [T | T]

    Credit        offsets            [0, 6, 13]
                  advantages         [0, 0, 0, 0, 0.5, 0.5
                                      | 0, 0, 0, 0, -0.5, -0.5, -0.5]

    TrainingBatch offsets            [0, 6, 13]
                  loss_weight        [0.2 | 0.2]

The token 5 ("3") of the first response was sampled with probability exp(-0.5). Its
position is 4 in the row, so `log_probs[4]` is -0.5. The reward function scored the
right response 1 and the wrong one 0; no shaping and no KL penalty changed the scores,
so they are the rewards. The advantage is that of Dr. GRPO: the reward minus the mean of
the group, which is 0.5. `Credit` repeats it on every response token. The loss is the
mean over all 5 response tokens, so each token loss weighs 1 / 5.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from verl_ray.columns.batch import ANY, Array, Batch, Int64, Ragged, ragged, row, token

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Int8 = npt.NDArray[np.int8]
Int16 = npt.NDArray[np.int16]
Int32 = npt.NDArray[np.int32]

Statistics = npt.NDArray[np.float64]
"""[rows, 4]: sum, sum of squares, maximum and minimum over a row's response tokens."""


class Finish(enum.IntEnum):
    """Why a response ended."""

    # By itself: with an end-of-sequence token or a stop string, or as its episode did.
    STOP = 0
    # Cut at rollout.max_response_tokens, or by a limit of its episode.
    LENGTH = 1
    # Cut by an abort, or of an episode that is no member of its group.
    ABORTED = 2


# ----------------------------------------------------------------------------- sampling


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompts(Batch):
    """Prompts from a data set, one row each."""

    # Running number of the prompt in the run.
    group_id: Int64 = row(np.int64)
    # False where the record has no answer; `answer` is empty there.
    has_answer: Bool = row(np.bool_)
    # Token ids after the chat template.
    tokens: Array = token(np.int32)
    # UTF-8 JSON: the prompt as the data set has it, a text or a list of messages.
    messages: Ragged = ragged(np.uint8)
    # UTF-8: selects the reward function.
    data_source: Ragged = ragged(np.uint8)
    # UTF-8: what the reward function compares the response with.
    answer: Ragged = ragged(np.uint8)
    # UTF-8 JSON object: the other fields of the record.
    extra: Ragged = ragged(np.uint8)
    # UTF-8 JSON object: what the record itself gives to the chat template. Absent where
    # prompts are no records of a data set.
    template_arguments: Ragged | None = ragged(np.uint8, optional=True)


NO_EPISODE = -1
"""The `end` of a single response in a run that has episodes as well.

It indexes the last one of a table with an entry for each end and one more.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Batch):
    """Whole token sequences, whoever wrote them: input of a model's forward pass."""

    # Token ids.
    tokens: Array = token(np.int32)
    # True on tokens that the policy chose; never on a row's first token.
    response_mask: Bool = token(np.bool_)
    # [tokens, hidden layers, experts per token]: the experts that the sampler's routers
    # chose for each token; 0 in layers without experts, and from the row's last
    # response token on, which no sampled token depends on. Absent where they are not
    # recorded.
    routed_experts: Int16 | None = token(np.int16, ANY, ANY, optional=True)
    # [tokens, candidates]: further tokens in the place of each, whose log-probs a loss
    # asks for. Absent without such a loss.
    candidates: Int32 | None = token(np.int32, ANY, optional=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollouts(Rows):
    """Prompt and response as one row of tokens, with what the sampler knew."""

    # Unique in the run.
    row_id: Int64 = row(np.int64)
    # Shared by the rows of one trajectory; their rewards add up to its reward.
    trajectory_id: Int64 = row(np.int64)
    # Shared by the rows of one prompt: the unit of group baselines.
    group_id: Int64 = row(np.int64)
    # Tokens before the first response token.
    prompt_length: npt.NDArray[np.int32] = row(np.int32)
    # Tokens where response_mask is True.
    response_length: npt.NDArray[np.int32] = row(np.int32)
    # A Finish; that of the whole episode on each of its rows.
    finish: npt.NDArray[np.int8] = row(np.int8)
    # Log-probabilities at sampling, after temperature; 0 outside the mask.
    rollout_log_probs: Float32 = token(np.float32)
    # (first token of the span, policy version), ascending
    version_spans: Ragged = ragged(np.int64, 2)
    # Policy version of the row's first response token; -1 without response tokens.
    oldest_version: Int64 = row(np.int64)
    # Policy version of the row's last response token; -1 without response tokens.
    newest_version: Int64 = row(np.int64)
    # The same column and the same four texts as in Prompts.
    has_answer: Bool = row(np.bool_)
    messages: Ragged = ragged(np.uint8)
    data_source: Ragged = ragged(np.uint8)
    answer: Ragged = ragged(np.uint8)
    extra: Ragged = ragged(np.uint8)
    # The next seven are absent where all rollouts are single responses. Number of the
    # episode's End, in the order of that enumeration; NO_EPISODE of a single response.
    end: Int8 | None = row(np.int8, optional=True)
    # UTF-8: what failed in the episode; empty where nothing did.
    end_detail: Ragged | None = ragged(np.uint8, optional=True)
    # Turns of the policy in the whole episode.
    num_turns: npt.NDArray[np.int32] | None = row(np.int32, optional=True)
    # What the environment paid for the whole episode, on its last row; 0 on others.
    episode_score: Float32 | None = row(np.float32, optional=True)
    # UTF-8 JSON, on the last row of an episode; empty on others. `conversations` are
    # lists of messages, in the order of their last turns, which what the environment
    # answered follows, and `response` is the text of the last turn. `output` is what
    # the command of the episode has printed, where that is anything.
    episode_record: Ragged | None = ragged(np.uint8, optional=True)
    # (last token of a turn, reward of the turn, number of the turn in the episode); the
    # rewards of an episode add up to its score. Turns of several rows may alternate.
    turn_rewards: Ragged | None = ragged(np.float64, 3, optional=True)
    # UTF-8 JSON object: numbers that the environment has recorded about the episode, by
    # name; on its last row, empty on others and where it has recorded none.
    episode_metrics: Ragged | None = ragged(np.uint8, optional=True)


def last_rows(trajectory_id: Int64) -> Int64:
    """Return the number of the last row of each trajectory, int64 [trajectories].

    Args:
        trajectory_id: int64 [rows]; the rows of one are adjacent, in the order of time.
    """
    is_last = np.append(trajectory_id[1:] != trajectory_id[:-1], True)
    return np.flatnonzero(is_last[: len(trajectory_id)])


def sums_of_trajectories(trajectory_id: Int64, values: Array) -> Array:
    """Return the sum over the rows of each trajectory, [trajectories].

    Args:
        trajectory_id: As in `last_rows`.
        values: [rows]; the sums have its dtype.
    """
    ends = last_rows(trajectory_id) + 1
    starts = np.append(0, ends)[: len(ends)]
    sums: Array = np.add.reduceat(values, starts, dtype=values.dtype)
    return sums


class PromptColumns(TypedDict):
    """The columns that `Rollouts` and `Prompts` both have, but for the tokens."""

    group_id: Int64
    has_answer: Bool
    messages: Ragged
    data_source: Ragged
    answer: Ragged
    extra: Ragged


def prompt_columns(prompts: Prompts) -> PromptColumns:
    """Return the columns of rollouts that are those of their prompts.

    Args:
        prompts: The prompt of each row.
    """
    return {
        "group_id": prompts.group_id,
        "has_answer": prompts.has_answer,
        "messages": prompts.messages,
        "data_source": prompts.data_source,
        "answer": prompts.answer,
        "extra": prompts.extra,
    }


class RowVersions(TypedDict):
    """Two columns of `Rollouts`."""

    oldest_version: Int64
    newest_version: Int64


def versions_of(spans: Ragged) -> RowVersions:
    """Return the oldest and newest version of each row; -1 for a row without spans."""
    num_rows = len(spans)
    starts = spans.offsets[:-1]
    ends = spans.offsets[1:]
    has_spans = np.diff(spans.offsets) > 0

    oldest = np.full(num_rows, -1, np.int64)
    newest = np.full(num_rows, -1, np.int64)
    oldest[has_spans] = spans.values[starts[has_spans], 1]
    newest[has_spans] = spans.values[ends[has_spans] - 1, 1]
    return {"oldest_version": oldest, "newest_version": newest}


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests(Batch):
    """Token sequences to continue: prompts, or conversations so far."""

    # Chosen by the caller; unique in one call.
    request_id: Int64 = row(np.int64)
    # The same tokens and seed have the same response.
    seed: Int64 = row(np.int64)
    # Requests of one session share a prefix.
    session: Int64 = row(np.int64)
    # Token ids.
    tokens: Array = token(np.int32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Responses(Batch):
    """Parts of responses, in the order of their generation.

    Each response token of a request stands in exactly one of its parts.
    """

    # The request that the row is a response to.
    request_id: Int64 = row(np.int64)
    # Index in the whole response of the row's first token.
    first_token: npt.NDArray[np.int32] = row(np.int32)
    # A Finish, or UNFINISHED where more parts follow.
    finish: npt.NDArray[np.int8] = row(np.int8)
    # Token ids.
    tokens: Array = token(np.int32)
    # Log-probability of each token at sampling.
    log_probs: Float32 = token(np.float32)
    # (index in the whole response of the span's first token, policy version)
    version_spans: Ragged = ragged(np.int64, 2)


UNFINISHED = -1


# --------------------------------------------------------------------------- experience


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores(Batch):
    """Scores of the reward role. No token columns: every row has length 0."""

    # NaN where health is not OK.
    score: Float32 = row(np.float32)
    # A rewards.ScoreHealth.
    health: npt.NDArray[np.int8] = row(np.int8)
    # UTF-8: why scoring failed; empty where it did not.
    detail: Ragged = ragged(np.uint8)
    # True where the first process that scored the row died.
    rescored: Bool = row(np.bool_)
    # True where there is more than a score.
    has_entries: Bool = row(np.bool_)
    # UTF-8 JSON object: what the grader returned beside the score, and what the
    # environment of an episode has recorded; empty where nothing.
    entries: Ragged = ragged(np.uint8)

    @classmethod
    def ok(cls, score: Float32) -> Scores:
        """Scores of which none failed; `score` float32 [rows]."""
        num_rows = len(score)
        no_tokens = np.zeros(num_rows + 1, np.int64)
        no_texts = Ragged(np.empty(0, np.uint8), no_tokens)
        return cls(
            offsets=no_tokens,
            score=score,
            health=np.zeros(num_rows, np.int8),
            detail=no_texts,
            rescored=np.zeros(num_rows, np.bool_),
            has_entries=np.zeros(num_rows, np.bool_),
            entries=no_texts,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TeacherForcedEvaluation(Batch):
    """How well a policy would write the responses of some demonstrations.

    No token columns: every row has length 0.
    """

    # True where greedy decoding writes the row's responses.
    exact: Bool = row(np.bool_)
    # Sum of the log-probabilities of the response tokens.
    log_prob: npt.NDArray[np.float64] = row(np.float64)
    # Number of these tokens.
    response_length: Int64 = row(np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class LogProbs(Batch):
    """Log-probabilities that a policy gives to the tokens of some rows."""

    # 0 outside the response mask
    log_probs: Float32 = token(np.float32)
    # Entropy of the distribution over token t.
    entropy: Float32 | None = token(np.float32, optional=True)
    # Sum over the vocabulary of the squared probabilities of that distribution.
    squared_probs: Float32 | None = token(np.float32, optional=True)
    # [tokens, count]: the most probable tokens in the place of each, and their
    # log-probabilities; absent if they were not asked for.
    top_tokens: Int32 | None = token(np.int32, ANY, optional=True)
    top_log_probs: Float32 | None = token(np.float32, ANY, optional=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Values(Batch):
    """Estimates of the critic before each token, and after the last one."""

    # 0 outside the response mask
    values: Float32 = token(np.float32)
    # After the row's last token.
    final_value: Float32 = row(np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergence(Batch):
    """Divergence of the policy from the reference, per response.

    No token columns: every row has length 0.
    """

    # Sum over the response tokens.
    kl: Float32 = row(np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class RowRewards(Batch):
    """Decision of the driver about each response, from the scores.

    No token columns: every row has length 0.
    """

    # Reward of the whole response, after shaping; 0 where there is none.
    reward: Float32 = row(np.float32)
    # Advantage of its trajectory over the group; 0 where the baseline is per token.
    advantage: Float32 = row(np.float32)
    # False without a score, or where the algorithm leaves the row out: no token of such
    # a row is learned from.
    in_loss: Bool = row(np.bool_)
    # Whether its reward counts in the baselines of others.
    is_member: Bool = row(np.bool_)
    # Whether its score is above 0 as it was graded, whatever is added or charged.
    is_positive: Bool = row(np.bool_)


# ----------------------------------------------------------------------------- learning


@dataclass(frozen=True, eq=False, kw_only=True)
class Credit(Batch):
    """Advantage of each token, and the sums over it that a step needs."""

    # 0 outside the response mask
    advantages: Float32 = token(np.float32)
    # Targets of the critic; absent without one.
    returns: Float32 | None = token(np.float32, optional=True)
    # Two columns of RowRewards.
    in_loss: Bool = row(np.bool_)
    is_positive: Bool = row(np.bool_)
    # Reward of the whole response, minus the KL penalty per token.
    reward: Float32 = row(np.float32)
    # Divergence from the reference over the response, before its coefficient.
    kl: Float32 = row(np.float32)
    # Tokens of the response whose divergence is the estimator's bound.
    kl_bounded: Int64 = row(np.int64)
    advantage_statistics: Statistics = row(np.float64, 4)
    # Absent without a critic, like the next two.
    return_statistics: Statistics | None = row(np.float64, 4, optional=True)
    value_statistics: Statistics | None = row(np.float64, 4, optional=True)
    # Statistics of returns - values.
    residual_statistics: Statistics | None = row(np.float64, 4, optional=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingBatch(Rows):
    """Input of a loss: the tokens under the response mask, and what belongs to them.

    Columns that an algorithm does not use are absent.
    """

    # Weight of each loss of the row, or of its unit: aggregation as one number per row.
    loss_weight: Float32 = row(np.float32)
    # Equal for rows that losses compare, or judge as one; absent where each row is one.
    unit: Int64 | None = row(np.int64, optional=True)
    # Margin of a preference pair, on both of its rows.
    margin: Float32 | None = row(np.float32, optional=True)
    # True where the response, which has no partner, is a desirable one.
    desirable: Bool | None = row(np.bool_, optional=True)
    # Log-probabilities at sampling.
    rollout_log_probs: Float32 | None = token(np.float32, optional=True)
    # 1 where the token is of the policy version that learns, else 0; absent where all
    # tokens are.
    is_fresh: Float32 | None = token(np.float32, optional=True)
    # Log-probabilities of the policy before the step.
    old_log_probs: Float32 | None = token(np.float32, optional=True)
    # Log-probabilities of the reference.
    ref_log_probs: Float32 | None = token(np.float32, optional=True)
    # Log-probabilities of the candidates, by the teacher.
    teacher_log_probs: Float32 | None = token(np.float32, ANY, optional=True)
    # Log-probability of the whole response, by the reference.
    ref_log_prob: Float64 | None = row(np.float64, optional=True)
    advantages: Float32 | None = token(np.float32, optional=True)
    # Values of the critic before the step.
    old_values: Float32 | None = token(np.float32, optional=True)
    # 1 where the policy loss treats the token apart, else 0.
    selected: Float32 | None = token(np.float32, optional=True)
    # 1 where the token's entropy is among the largest of its mini-batch, else 0.
    uncertain: Float32 | None = token(np.float32, optional=True)
    # Weight of the negative log-likelihood, beside `loss_weight`.
    nll_weight: Float32 | None = token(np.float32, optional=True)
    returns: Float32 | None = token(np.float32, optional=True)
    # Number of the row among those whose losses are reported one by one, and -1 for
    # others; absent where none is.
    recorded: Int64 | None = row(np.int64, optional=True)
