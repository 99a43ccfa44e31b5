"""The stages a row passes through, one frozen type each; a comment per column says what it holds.

Invariant: rows of different stages that belong together stand in the same order. Token t of a row holds what is known
about token t itself: `log_probs[t]` is the log-probability of token t given those before it, `values[t]` the value
before token t is taken. Deliberately not here: any computation.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_ray.data.batch import Array, Batch, Int64, Ragged, ragged, row, token

Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


class Finish(enum.IntEnum):
    """Why a response ended."""

    STOP = 0  # by itself: an end-of-sequence token or a stop string
    LENGTH = 1  # cut at rollout.max_response_tokens
    ABORTED = 2  # cut by an abort


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompts(Batch):
    """Prompts drawn from a data set, one row each."""

    group_id: Int64 = row(np.int64)  # running number of the prompt in the run
    tokens: Array = token(np.int32)  # token ids after the chat template
    messages: Ragged = ragged(np.uint8)  # UTF-8 JSON: the prompt as the data set has it, a text or a list of messages
    data_source: Ragged = ragged(np.uint8)  # UTF-8: which reward function grades it
    answer: Ragged = ragged(np.uint8)  # UTF-8: what the reward function compares with
    extra: Ragged = ragged(np.uint8)  # UTF-8 JSON object: whatever else the data set holds


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Batch):
    """Whole token sequences, whoever wrote their tokens: what a model can be asked about."""

    tokens: Array = token(np.int32)
    response_mask: Bool = token(np.bool_)  # True on tokens that the policy chose; never on a row's first token


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollouts(Rows):
    """Prompt and response as one row of tokens, with what the sampler knew."""

    row_id: Int64 = row(np.int64)  # unique in the run
    trajectory_id: Int64 = row(np.int64)  # rows of one trajectory share it, and their rewards add up to its own
    group_id: Int64 = row(np.int64)  # rows of one prompt share it: the unit of group baselines
    prompt_length: npt.NDArray[np.int32] = row(np.int32)  # tokens before the first response token
    response_length: npt.NDArray[np.int32] = row(np.int32)  # tokens where response_mask is True
    finish: npt.NDArray[np.int8] = row(np.int8)  # a Finish
    rollout_log_probs: Float32 = token(np.float32)  # as sampled, after temperature; 0 outside the mask
    version_spans: Ragged = ragged(np.int64, 2)  # (first token of the span, policy version), ascending
    oldest_version: Int64 = row(np.int64)  # the policy version of the row's first response token; -1 without tokens
    newest_version: Int64 = row(np.int64)  # and of its last one
    messages: Ragged = ragged(np.uint8)  # as in Prompts, like the following
    data_source: Ragged = ragged(np.uint8)
    answer: Ragged = ragged(np.uint8)
    extra: Ragged = ragged(np.uint8)


def versions_of(spans: Ragged) -> dict[str, Int64]:
    """The columns `oldest_version` and `newest_version`, int64 [rows], of rows with these version spans."""
    some = np.diff(spans.offsets) > 0
    versions = {name: np.full(len(some), -1, np.int64) for name in ("oldest_version", "newest_version")}
    versions["oldest_version"][some] = spans.values[spans.offsets[:-1][some], 1]
    versions["newest_version"][some] = spans.values[spans.offsets[1:][some] - 1, 1]
    return versions


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests(Batch):
    """Token sequences to continue, whoever wrote them: a prompt, or a conversation so far."""

    request_id: Int64 = row(np.int64)  # the caller's own; unique in one call
    seed: Int64 = row(np.int64)  # the same tokens and seed have the same response
    session: Int64 = row(np.int64)  # requests of one session share a prefix
    tokens: Array = token(np.int32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Responses(Batch):
    """Parts of responses, in the order they were drawn: each token of a request stands in exactly one."""

    request_id: Int64 = row(np.int64)
    first_token: npt.NDArray[np.int32] = row(np.int32)  # index in its response of the row's first token
    finish: npt.NDArray[np.int8] = row(np.int8)  # a Finish; UNFINISHED = more to come
    tokens: Array = token(np.int32)
    log_probs: Float32 = token(np.float32)  # of each token, as sampled
    version_spans: Ragged = ragged(np.int64, 2)  # (index in the response of the span's first token, policy version)


UNFINISHED = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores(Batch):
    """What the reward role says of each row. No token columns: every row has length 0."""

    score: Float32 = row(np.float32)  # NaN where health is not OK
    health: npt.NDArray[np.int8] = row(np.int8)  # a rewards.Health
    detail: Ragged = ragged(np.uint8)  # UTF-8: why it failed; empty where it did not
    rescored: Bool = row(np.bool_)  # True where the first process that scored the row died

    @classmethod
    def ok(cls, score: Float32) -> Scores:
        """Scores that no function can fail to give."""
        rows = len(score)
        nothing = Ragged(np.empty(0, np.uint8), np.zeros(rows + 1, np.int64))
        return cls(
            offsets=nothing.offsets,
            score=score,
            health=np.zeros(rows, np.int8),
            detail=nothing,
            rescored=np.zeros(rows, np.bool_),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class LogProbs(Batch):
    """Log-probabilities of a policy, for the tokens of the rows it was asked about."""

    log_probs: Float32 = token(np.float32)  # 0 outside the response mask
    entropy: Float32 | None = token(np.float32, optional=True)  # of the distribution token t was drawn from


@dataclass(frozen=True, eq=False, kw_only=True)
class Values(Batch):
    """The critic's estimate before each token, and after the last one."""

    values: Float32 = token(np.float32)  # 0 outside the response mask
    final_value: Float32 = row(np.float32)  # after the row's last token


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergence(Batch):
    """How far the policy is from the reference on each response. No token columns: every row has length 0."""

    kl: Float32 = row(np.float32)  # sum over the response tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class RowRewards(Batch):
    """What the driver decided about each response from the scores. No token columns: every row has length 0."""

    reward: Float32 = row(np.float32)  # of the whole response, after shaping; 0 where there is none
    advantage: Float32 = row(np.float32)  # of its trajectory against the group; 0 where the baseline is per token
    in_loss: Bool = row(np.bool_)  # False: no score, or kept out by the algorithm; its tokens are not learned from


Statistics = npt.NDArray[np.float64]  # [rows, 4]: sum, sum of squares, maximum, minimum over the response tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class Credit(Batch):
    """How much better than expected each token was, and the sums that a step needs of it."""

    advantages: Float32 = token(np.float32)  # 0 outside the response mask
    returns: Float32 | None = token(np.float32, optional=True)  # targets of the critic; absent without one
    in_loss: Bool = row(np.bool_)  # as in RowRewards
    reward: Float32 = row(np.float32)  # of the whole response, the divergence charged included
    kl: Float32 = row(np.float32)  # divergence from the reference over the response, before its coefficient
    advantage_statistics: Statistics = row(np.float64, 4)
    return_statistics: Statistics | None = row(np.float64, 4, optional=True)
    value_statistics: Statistics | None = row(np.float64, 4, optional=True)
    residual_statistics: Statistics | None = row(np.float64, 4, optional=True)  # of returns - values


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingBatch(Rows):
    """What a loss may look at: the tokens under the response mask. Columns an algorithm does not use are absent."""

    loss_weight: Float32 = row(np.float32)  # of each of the row's token losses: aggregation as one number per row
    margin: Float32 | None = row(np.float32, optional=True)  # of a pair, on both of its rows
    rollout_log_probs: Float32 | None = token(np.float32, optional=True)
    old_log_probs: Float32 | None = token(np.float32, optional=True)
    ref_log_probs: Float32 | None = token(np.float32, optional=True)
    advantages: Float32 | None = token(np.float32, optional=True)
    old_values: Float32 | None = token(np.float32, optional=True)
    returns: Float32 | None = token(np.float32, optional=True)
