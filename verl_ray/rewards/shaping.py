"""Shaping: from the scores of the graders to one reward per response.

Scores are normalised, clipped, weighted and added up. Rewards of lengths, or a user's
own shaping, add to them. Invariant: shaping needs one number per response and grader. A
grader that returned None leaves a response to the others. One that a grader failed has
no reward, and neither has one that all of them left, or whose sum is beyond 1e18. What
is added is of responses that are members of a group, those whose rewards its baseline
compares. The state is the moments of the scores so far, so a resumed run shapes as if
it had never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.estimators import RewardPart
from verl_ray.algorithms.reward_shaping import (
    LENGTH_REWARDS,
    OWN_SHAPINGS,
    ScoredResponses,
    overlong_penalty,
)
from verl_ray.columns.batch import Int64
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import (
    NO_EPISODE,
    Bool,
    Finish,
    Float32,
    Rollouts,
    Scores,
)
from verl_ray.config.agent import ENVIRONMENT
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.reward import MixedReward, SingleReward
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.learning.credit import says_something
from verl_ray.ops.masked import Moments, whiten, without_rounding
from verl_ray.rewards.health import LARGEST, ScoreHealth
from verl_ray.settings.function_specs import DEFAULT

Healths = npt.NDArray[np.int8]

Part = tuple[float, Float32]
"""A weight, and what it weights, [rows]."""

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, eq=False)
class ResponseScores:
    """Scores of some responses, as columns: of one grader, or shaped."""

    # [rows], NaN where health is not OK
    score: Float32
    # [rows], numbers of ScoreHealth
    health: Healths
    rescored: int = 0
    """Number of rows that were scored again, since their first process died."""
    parts: tuple[Part, ...] = ()
    """Weights, and what they weight, of which the scores are the sum; () for none.

    A part is NaN where its grader gave no score.
    """
    graded: Float32 | None = None
    """The scores neither normalised nor with additions; None: they are `score`."""

    @property
    def ok(self) -> Bool:
        """Rows with a score, bool [rows]."""
        has_score: Bool = self.health == ScoreHealth.OK
        return has_score

    @property
    def as_graded(self) -> Float32:
        """The scores by which a response is right: those above 0, float32 [rows]."""
        return self.score if self.graded is None else self.graded

    @property
    def summands(self) -> tuple[Part, ...]:
        """Terms of which the scores are the sum: their parts, or the scores alone."""
        return self.parts or ((1.0, self.score),)

    def plus(self, *additions: Part) -> ResponseScores:
        """Return these scores with weighted additions, which are further parts of them.

        A sum beyond 1e18 is a failed score.
        """
        # Not from `score`, which is rounded: what cancels on paper would leave a rest.
        parts = (*self.summands, *additions)
        scores, health = _sum(parts, self.health)
        return replace(
            self,
            score=scores,
            health=health,
            parts=parts,
            graded=self.as_graded,
        )

    def on_rows(self, rows: Int64) -> ResponseScores:
        """Return scores that stand on these rows, and 0 on all others up to the last.

        Args:
            rows: The row of each response, ascending, int64 [responses].
        """
        num_rows = int(rows.max(initial=-1)) + 1
        if len(rows) == num_rows:
            return self

        def spread(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
            column = np.zeros(num_rows, values.dtype)
            column[rows] = values
            return column

        return replace(
            self,
            score=spread(self.score),
            health=spread(self.health),
            parts=tuple((weight, spread(values)) for weight, values in self.parts),
            graded=None if self.graded is None else spread(self.graded),
        )


@dataclass(frozen=True, eq=False)
class Rewards:
    """The rewards of some responses, and what was added to their scores for them.

    Attributes:
        scores: The rewards; the additions are further parts of them.
        additions: The weighted additions by their names, float32 [responses] each.
        is_member: The responses that have a score and are members of their groups,
            bool [responses]. To all others nothing is added.
    """

    scores: ResponseScores
    additions: Mapping[str, Float32]
    is_member: Bool


def response_scores(scores: Mapping[str, Sharded[Scores]]) -> dict[str, ResponseScores]:
    """Return the scores of each grader as columns of the driver."""
    columns = {}
    for name, rows in scores.items():
        rescored = int(rows.row("rescored").sum())
        columns[name] = ResponseScores(rows.row("score"), rows.row("health"), rescored)
    return columns


class Shaping:
    """Rule of a run that turns the scores of its graders into rewards."""

    def __init__(self, config: RLConfig) -> None:
        self._config = config
        self._graders = config.graders
        self._weights = _weights(config)
        self._moments = dict.fromkeys(self._graders, Moments(0, 0, 0))

    def rewards(self, groups: Experience) -> Rewards:
        """Return the rewards of whole groups, one per trajectory."""
        # A trajectory of several rows is scored as a whole, on the last of them.
        responses = groups.of_trajectories()
        rollouts = responses.rollouts
        aborted = rollouts.row("finish") == Finish.ABORTED
        scores = self.shape(response_scores(responses.scores), aborted)
        return with_additions(self._config, scores, rollouts, groups.response_lengths)

    def shape(
        self,
        raw: Mapping[str, ResponseScores],
        aborted: npt.NDArray[np.bool_] | None = None,
    ) -> ResponseScores:
        """Return the rewards to learn from, float32 [rows].

        Args:
            raw: The scores of each grader, by its role.
            aborted: Responses that were aborted, bool [rows]; None where none was.
                Their scores do not count towards the moments of normalisation.
        """
        parts, grader_scores = [], []
        for role, scores in raw.items():
            weight = self._weights[role]
            shaped = self._normalise_and_clip(role, scores, aborted)
            normalised = np.where(scores.ok, shaped, np.float32(np.nan))
            parts.append((weight, normalised))
            # Normalised scores lie around 0, and their bound is one of deviations.
            is_normalised = self._graders[role].normalise != "none"
            one_grader = scores.score if is_normalised else normalised
            grader_scores.append((weight, one_grader))
        graded, health = _sum(grader_scores, _health(raw))
        rewards, health = _sum(parts, health)
        return ResponseScores(rewards, health, parts=tuple(parts), graded=graded)

    def weigh(self, raw: Mapping[str, ResponseScores]) -> ResponseScores:
        """Return the weighted sum of scores without normalising and clipping.

        It changes no state: it is for held-out problems, and for people to read.
        """
        # A grader of held-out problems alone has no weight.
        parts = [
            (self._weights.get(role, 1.0), scores.score) for role, scores in raw.items()
        ]
        weighted, health = _sum(parts, _health(raw))
        return ResponseScores(weighted, health, parts=tuple(parts))

    def state(self) -> dict[str, Any]:
        """The moments so far, as JSON."""
        return {
            role: {"kind": self._graders[role].kind, **asdict(moments)}
            for role, moments in self._moments.items()
        }

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the moments of `state`.

        A grader that `state` lacks, or has as another kind, begins anew.
        """
        for role, grader in self._graders.items():
            saved = dict(state.get(role, {}))
            if saved.pop("kind", None) == grader.kind:
                self._moments[role] = Moments(**saved)

    def _normalise_and_clip(
        self, role: str, scores: ResponseScores, aborted: npt.NDArray[np.bool_] | None
    ) -> Float32:
        """Normalise and clip the scores of one grader, and update its moments."""
        grader: SingleReward = self._graders[role]
        score = scores.score

        if grader.normalise != "none":
            counted = scores.ok
            if aborted is not None:
                counted = counted & ~aborted
            moments = Moments.of(score, counted)
            # "batch" normalises with this batch alone
            if grader.normalise == "running":
                moments = self._moments[role] + moments
                self._moments[role] = moments
            score = whiten(score, moments)

        if grader.clip is None:
            return score
        return np.clip(score, -grader.clip, grader.clip)


# ------------------------------------------------------------------ additions to scores


def with_additions(
    config: RLConfig,
    scores: ResponseScores,
    rollouts: Sharded[Rollouts],
    length: Int64,
) -> Rewards:
    """Return rewards: scores with what lengths, or a user's own shaping, add to them.

    Each addition becomes one of their parts, with its weight. A response that is no
    member of its group gets none. The greedy response of ReMax gets what it is worth
    among its group, since it is what the others are compared with.

    Args:
        config: Configuration of the run.
        scores: Normalised and weighted scores.
        rollouts: Their responses, whole groups of them; of trajectories of several rows
            the last one.
        length: int64 [responses], sampled tokens of each.
    """
    max_tokens = _most_tokens(config)
    is_member = scores.ok & says_something(config.algorithm, rollouts.row("finish"))
    if config.algorithm.shaping is None:
        parts = length_rewards(
            config.algorithm,
            scores.as_graded,
            is_member,
            length,
            rollouts.row("group_id"),
            _limits_of_responses(config, rollouts, max_tokens),
        )
    else:
        responses = ScoredResponses(
            score=scores.score,
            group=rollouts.row("group_id"),
            valid=is_member,
            trajectory=rollouts.row("trajectory_id"),
            length=length,
            truncated=rollouts.row("finish") == Finish.LENGTH,
            parts=scores.parts,
            max_tokens=max_tokens,
        )
        parts = {"shaping": (1.0, _own_addition(config, responses))}
    if not parts:
        return Rewards(scores, {}, is_member)

    additions = {
        name: np.float32(weight) * values for name, (weight, values) in parts.items()
    }
    return Rewards(scores.plus(*parts.values()), additions, is_member)


def _most_tokens(config: RLConfig) -> int:
    """Return how many tokens a response may have, or all turns of an episode."""
    episode_tokens = None if config.episodes is None else config.episodes.max_tokens
    return episode_tokens or config.rollout.max_response_tokens


def _limits_of_responses(
    config: RLConfig, rollouts: Sharded[Rollouts], max_tokens: int
) -> int | Int64:
    """Return how many tokens each response may have: one number, or [responses].

    Args:
        max_tokens: How many all turns of an episode may have.
    """
    if config.episodes is None:
        return max_tokens
    is_single = rollouts.row("end") == NO_EPISODE
    limits: Int64 = np.where(
        is_single, config.rollout.max_response_tokens, np.int64(max_tokens)
    )
    return limits


def _own_addition(config: RLConfig, responses: ScoredResponses) -> Float32:
    """Return what a user's own function adds to the scores, float32 [responses]."""
    algorithm = config.algorithm
    assert algorithm.shaping is not None
    shaped = OWN_SHAPINGS[algorithm.shaping].shape(algorithm, responses)
    added = np.where(responses.valid, shaped - responses.score, 0)
    return added.astype(np.float32)


# ------------------------------------------------------------ weights, health and sums


def turn_weights(config: RLConfig) -> dict[str, float]:
    """Return what the rewards of turns count in the reward, by data source.

    The graders that take the score of the episode, the sum of these rewards, say so by
    their weights. Of a score that any other function makes, or of a normalised one,
    nobody knows which turn earned it.
    """
    weights = _weights(config)
    functions = {
        role: grader.named_functions or {}
        for role, grader in config.graders.items()
        if grader.normalise == "none"
    }
    sources = {DEFAULT}.union(*functions.values())
    return {
        source: sum(
            weights[role]
            for role, source_functions in functions.items()
            if source_functions.get(source, source_functions.get(DEFAULT))
            == ENVIRONMENT
        )
        for source in sources
    }


def _weights(config: RLConfig) -> dict[str, float]:
    """Return the weight of each grader, by its role."""
    weights: Mapping[str, float] = {}
    if isinstance(config.reward, MixedReward):
        weights = config.reward.weights
    return {role: weights.get(component(role), 1.0) for role in config.graders}


def component(role: str) -> str:
    """Return the name of a grader in metrics: "style" for "reward.components.style"."""
    return role.rpartition(".")[2]


def failures(healths: Mapping[str, Healths]) -> dict[str, Bool]:
    """Return which rows each of several graders has failed, bool [rows].

    One that returns None says that a response is not its task, which is no failure
    where another grader scores it. Neither is an episode that was dropped.

    Args:
        healths: Numbers of `ScoreHealth`, [rows], by grader.
    """
    has_declined = {
        role: health == ScoreHealth.NONE for role, health in healths.items()
    }
    left_by_all = np.all(list(has_declined.values()), axis=0)
    return {
        role: ~np.isin(health, (ScoreHealth.OK, ScoreHealth.DROPPED))
        & (left_by_all | ~has_declined[role])
        for role, health in healths.items()
    }


def _health(raw: Mapping[str, ResponseScores]) -> Healths:
    """Return the health of each row, [rows]: dropped, or that of its first failure."""
    healths = {role: scores.health for role, scores in raw.items()}
    health = np.zeros(len(next(iter(healths.values()))), np.int8)
    for role, failed in failures(healths).items():
        is_missing = failed | (healths[role] == ScoreHealth.DROPPED)
        is_first = is_missing & (health == ScoreHealth.OK)
        health = np.where(is_first, healths[role], health)
    return health


def _sum(parts: Sequence[Part], health: Healths) -> tuple[Float32, Healths]:
    """Add up weighted scores, in float64.

    Args:
        parts: The scores; those that are NaN count nothing, since nobody gave them.
            A sum in which they cancel but for rounding is 0.
        health: Of each row, [rows].

    Returns:
        The sums, NaN for failed rows; and the health of each row, which is NONFINITE
        where the sum is beyond 1e18.
    """
    is_ok = health == ScoreHealth.OK
    total = np.zeros(len(health))
    magnitude = np.zeros(len(health))
    # Weights have no bounds.
    with np.errstate(over="ignore", invalid="ignore"):
        for weight, values in parts:
            term = weight * np.where(np.isnan(values), 0, values).astype(np.float64)
            total += term
            magnitude += np.abs(term)

    # NaN is not less than anything.
    fits = is_ok & (np.abs(total) <= LARGEST)
    health = np.where(is_ok & ~fits, np.int8(ScoreHealth.NONFINITE), health)
    sums = np.where(fits, without_rounding(total, magnitude), np.nan)
    return sums.astype(np.float32), health


def length_rewards(
    algorithm: AlgorithmConfig,
    score: Float32,
    valid: Bool,
    length: Int64,
    group: Int64,
    max_tokens: int | Int64,
) -> dict[str, RewardPart]:
    """Return the weight of each reward that the configuration asks for, and the reward.

    They are `overlong_penalty`, whose weight is 1, and those of `LENGTH_REWARDS`. None
    is weighted yet: GDPO normalises rewards before it weights them.

    Args:
        algorithm: The section `algorithm` of the configuration.
        score: float32 [rows], by which responses are right.
        valid: bool [rows]; False: the response has no score, or is no member of its
            group. Its length is not compared, and it gets 0.
        length: int64 [rows], response tokens.
        group: int64 [rows], the group of each response.
        max_tokens: The limit on the length of a response; or int64 [rows].
    """
    parts: dict[str, RewardPart] = {}
    share = algorithm.overlong_share
    if share is not None:
        penalty = overlong_penalty(length, max_tokens, share)
        parts["overlong_penalty"] = (1.0, np.where(valid, penalty, np.float32(0)))
    for name, reward in LENGTH_REWARDS.items():
        weight = getattr(algorithm, name)
        if weight is not None:
            parts[name] = (weight, reward.function(score, valid, length, group))
    return parts
