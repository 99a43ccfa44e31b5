"""Metrics of evaluations on held-out rows, and the result of one, of any task.

Invariant: metrics are pure functions of the scores of held-out responses. Metrics,
samples and scores are whole when the evaluation returns; responses are read from the
cluster only when somebody goes through them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np
import numpy.typing as npt

from controllers.watch.measures import Metrics, spread
from verl_ray.algorithms.subsets import NO_ANSWER, Answers
from verl_ray.errors import RewardError
from verl_ray.rewards.built_in import PRED
from verl_ray.rewards.health import Entries, ScoreHealth
from verl_ray.rewards.shaping import ResponseScores
from verl_ray.tracking.base import Sample
from verl_ray.tracking.evaluations import HeldOutScores
from verl_ray.tracking.held_out_names import ACCURACY, REWARD, ScoreName
from verl_ray.tracking.held_out_responses import HeldOutResponse


@dataclass(frozen=True)
class Evaluation:
    """The findings of an evaluation."""

    metrics: Metrics

    samples: Sequence[Sample] = ()
    """Rollouts to read; none for a task that generates nothing."""

    scores: HeldOutScores | None = None
    """Scores of each problem; None for a task that has none to compare."""

    responses: Iterable[HeldOutResponse] = ()
    """Every response with its score. They can be read while the processes run."""


class EvaluationFailed(RewardError):
    """More scores have failed than an evaluation may have.

    Attributes:
        responses: Those without a score. They can be read while the processes run.
    """

    def __init__(self, message: str, responses: Iterable[HeldOutResponse]) -> None:
        """Take what is said, and the responses."""
        super().__init__(message)
        self.responses = responses


Float64s = npt.NDArray[np.float64]

CALIBRATION_BINS = 10

PAIR_ACCURACY = "val-core/held_out/pair_accuracy"
LOG_LOSS = "val-core/held_out/log_loss"
AUC = "val-core/held_out/auc"


@dataclass(frozen=True, eq=False)
class CoreScores:
    """Numbers that count in the main metric of each data source."""

    names: list[ScoreName]
    """Name of the metric of each response, [rows]."""
    values: Float64s
    """Number of each response, [rows]; NaN where it is left out."""

    @property
    def metrics(self) -> list[str]:
        """The names as metrics have them, [rows]."""
        return list(map(str, self.names))

    def means(self) -> Metrics:
        """Return the mean of each metric; NaN where nothing counts."""
        metrics = self.metrics
        names = np.array(metrics)
        means: Metrics = {}
        for name in sorted(set(metrics)):
            values = self.values[names == name]
            counted = values[~np.isnan(values)]
            means[name] = float(counted.mean()) if len(counted) else nan
        return means


def core_scores(
    sources: Sequence[str],
    scores: ResponseScores,
    entries: Sequence[Entries],
    right_or_wrong: Container[str],
    group_size: int,
) -> CoreScores:
    """Return what counts in val-core/<data source>/{acc,reward}/mean@N.

    It is an accuracy where scores are right (1) or wrong (0), and where the function
    returns an entry `acc`. A response without one counts as wrong. Other scores may
    have any scale, so failed ones are left out of the mean reward. Episodes that were
    dropped are left out of both.

    Args:
        sources: Data source of each response, [rows].
        scores: Scores of the responses.
        entries: What the function returned beside them, [rows].
        right_or_wrong: Data sources whose scores are accuracies.
        group_size: Number of responses per prompt.
    """
    with_accuracy = {
        source
        for source, row in zip(sources, entries, strict=True)
        if isinstance(row.get(ACCURACY), float)
    }
    core_names = []
    values = np.where(scores.ok, scores.score, nan).astype(np.float64)
    for row, source in enumerate(sources):
        kind = REWARD
        if source in right_or_wrong:
            kind = ACCURACY
            values[row] = np.nan_to_num(values[row])
        elif source in with_accuracy:
            kind = ACCURACY
            accuracy = entries[row].get(ACCURACY)
            values[row] = accuracy if isinstance(accuracy, float) else 0.0
        core_names.append(ScoreName.of_means(source, kind, group_size))
    values[scores.health == ScoreHealth.DROPPED] = nan
    return CoreScores(core_names, values)


def reward_scores(
    scores: ResponseScores, core: CoreScores, problems: HeldOutScores
) -> list[HeldOutScores]:
    """Return the rewards where the main metric is another, a part per data source.

    They count in val-aux/<data source>/reward/mean@N, and failed ones in none.

    Args:
        scores: Scores of the responses.
        core: What counts in the main metrics.
        problems: Scores of the problems in the main metrics.
    """
    values = np.where(scores.ok, scores.score, nan).astype(np.float64)
    values = values.reshape(problems.scores.shape)
    names = core.names[:: problems.scores.shape[1]]
    parts = []
    for name in sorted({name for name in names if name.kind != REWARD}, key=str):
        rows = np.array([row for row, other in enumerate(names) if other == name])
        metric = str(replace(name, kind=REWARD).aside)
        parts.append(problems.select(rows).of_metric(metric, values[rows]))
    return parts


def reward_metrics(parts: Sequence[HeldOutScores]) -> Metrics:
    """Return the mean of each part of `reward_scores`; NaN where nothing counts."""
    metric_means: Metrics = {}
    for part in parts:
        counted = part.scores[~np.isnan(part.scores)]
        mean = float(counted.mean()) if len(counted) else nan
        metric_means[part.metrics[0]] = mean
    return metric_means


def missing_scores(scores: ResponseScores) -> Metrics:
    """Return how many scores failed, and how many episodes were dropped."""
    is_dropped = scores.health == ScoreHealth.DROPPED
    return {
        "val-aux/failed_scores": float((~scores.ok & ~is_dropped).sum()),
        "val-aux/dropped": float(is_dropped.sum()),
    }


def problem_counts(sources: Sequence[str]) -> Metrics:
    """Return val-aux/<data source>/num_prompts, the problems of each data source.

    Args:
        sources: Data source of each problem.
    """
    return {
        f"val-aux/{source}/num_prompts": float(count)
        for source, count in Counter(sources).items()
    }


def length_scores(
    scores: HeldOutScores,
    sources: Sequence[str],
    lengths: npt.NDArray[np.int64],
    is_cut: npt.NDArray[np.bool_],
) -> list[HeldOutScores]:
    """Return the length of each response, and whether it was cut, as scores.

    They count in val-aux/<data source>/response_length/{mean,clip_ratio}.

    Args:
        scores: Scores of the problems in the main metrics.
        sources: Data source of each problem, [problems].
        lengths: Tokens of each response, [rows].
        is_cut: Responses that were cut at the length limit, bool [rows].
    """
    shape = scores.scores.shape
    values = {
        "mean": lengths.reshape(shape).astype(np.float64),
        "clip_ratio": is_cut.reshape(shape).astype(np.float64),
    }
    parts = []
    for source in sorted(set(sources)):
        rows = np.flatnonzero(np.array(sources) == source)
        source_scores = scores.select(rows)
        for name, numbers in values.items():
            metric = f"val-aux/{source}/response_length/{name}"
            parts.append(source_scores.of_metric(metric, numbers[rows]))
    return parts


def length_metrics(parts: Sequence[HeldOutScores]) -> Metrics:
    """Return val-aux/<data source>/response_length/{mean,max,min,clip_ratio}.

    Args:
        parts: What `length_scores` has returned.
    """
    metrics: Metrics = {}
    for part in parts:
        name = part.metrics[0]
        metrics[name] = float(part.scores.mean())
        if name.endswith("/mean"):
            prefix = name.removesuffix("mean")
            metrics[f"{prefix}max"] = float(part.scores.max())
            metrics[f"{prefix}min"] = float(part.scores.min())
    return metrics


def numbered_answers(entries: Sequence[Entries], group_size: int) -> Answers | None:
    """Return the number of each response's answer, int32 [problems, group_size].

    Equal answers to a problem have the number of the first response with it, and
    responses without one have `NO_ANSWER`. None is returned where nobody has one.

    Args:
        entries: What the function returned beside the scores, [rows]. The answer is
            `pred`, a text or a number.
        group_size: Number of responses per problem.
    """
    answers = np.full((len(entries) // group_size, group_size), NO_ANSWER, np.int32)
    for problem, row in enumerate(answers):
        first = problem * group_size
        numbers: dict[float | str, int] = {}
        for member in range(group_size):
            answer = entries[first + member].get(PRED)
            if answer is not None:
                row[member] = numbers.setdefault(answer, member)
    return answers if (answers != NO_ANSWER).any() else None


def preference_metrics(chosen: Float64s, rejected: Float64s) -> Metrics:
    """Return how well a reward model ranks held-out pairs of responses.

    pair_accuracy is how often the chosen response scores higher; a tie counts half.
    log_loss is that of the preferences (log 2 for a coin). calibration_error is the
    mean distance of certainty and accuracy over ten bins of certainty from 1/2 to 1,
    weighted by pairs (arXiv:1706.04599, section 2). If a score is not finite, log_loss
    and calibration_error are NaN.

    Args:
        chosen: Score of the better response of each pair, float64 [pairs].
        rejected: Score of the other response, float64 [pairs].
    """
    difference = chosen - rejected
    is_right = right(chosen, rejected)

    log_loss = nan
    calibration_error = nan
    if np.isfinite(difference).all():
        log_loss = float(log_losses(chosen, rejected).mean())
        calibration_error = _calibration_error(difference, is_right)

    return {
        PAIR_ACCURACY: float(is_right.mean()),
        LOG_LOSS: log_loss,
        "val-aux/held_out/calibration_error": calibration_error,
        "val-aux/held_out/num_pairs": float(len(is_right)),
        **spread("val-aux/held_out/margin", difference),
        **spread("val-aux/held_out/chosen", chosen),
        **spread("val-aux/held_out/rejected", rejected),
        "val-aux/held_out/std": float(np.concatenate([chosen, rejected]).std()),
    }


def label_metrics(rewards: Float64s, is_desirable: npt.NDArray[np.bool_]) -> Metrics:
    """Return how well rewards tell desirable from undesirable held-out responses.

    auc is the share of all pairs of a desirable and an undesirable response in which
    the desirable one has the larger reward; a tie counts half.

    Args:
        rewards: Reward of each response, float64 [rows].
        is_desirable: Label of each response; some have either, bool [rows].
    """
    return {
        AUC: float(auc_scores(rewards, is_desirable).mean()),
        "val-aux/held_out/num_responses": float(len(rewards)),
        **spread("val-aux/held_out/chosen", rewards[is_desirable]),
        **spread("val-aux/held_out/rejected", rewards[~is_desirable]),
    }


def auc_scores(rewards: Float64s, is_desirable: npt.NDArray[np.bool_]) -> Float64s:
    """Return a score of each response, of which the mean is the AUC; NaN with a NaN.

    What a response adds to the AUC is the share of responses with the other label that
    it is on the right side of. Its distance from the AUC is divided by the share of its
    own label, so that the variance of the mean is that of the AUC, also of the
    difference of two evaluations.

    Source: E. DeLong et al. (Biometrics 44, 1988, eqs. 4 to 6).

    Args:
        rewards: Reward of each response, float64 [rows].
        is_desirable: Label of each response; some have either, bool [rows].
    """
    if np.isnan(rewards).any():
        return np.full(len(rewards), nan)

    scores = np.empty(len(rewards))
    for has_label, sign in ((is_desirable, 1), (~is_desirable, -1)):
        others = np.sort(sign * rewards[~has_label])
        own = sign * rewards[has_label]
        # A tie counts half: it is between the two sides.
        below = np.searchsorted(others, own, "left")
        not_above = np.searchsorted(others, own, "right")
        scores[has_label] = (below + not_above) / (2 * len(others))

    auc = scores[is_desirable].mean()
    share = np.where(is_desirable, is_desirable.mean(), (~is_desirable).mean())
    return np.asarray(auc + (scores - auc) / share, dtype=np.float64)


def log_losses(chosen: Float64s, rejected: Float64s) -> Float64s:
    """Return the loss of each preference, [pairs]; NaN where a score is not finite.

    Args:
        chosen: Score of the better response of each pair, float64 [pairs].
        rejected: Score of the other response, float64 [pairs].
    """
    difference = chosen - rejected
    difference = np.where(np.isfinite(difference), difference, nan)
    return np.asarray(np.logaddexp(0, -difference), dtype=np.float64)


def right(chosen: Float64s, rejected: Float64s) -> Float64s:
    """Return 1 where the chosen response scores higher, 1/2 for a tie, else 0.

    Args:
        chosen: Score of the better response of each pair, float64 [pairs].
        rejected: Score of the other response, float64 [pairs].
    """
    return np.asarray((1 + np.sign(chosen - rejected)) / 2, dtype=np.float64)


def _calibration_error(difference: Float64s, is_right: Float64s) -> float:
    """Return the expected calibration error of a reward model.

    Args:
        difference: Score of the chosen less that of the rejected response, [pairs].
        is_right: See `right`, [pairs].
    """
    # Beyond 700, exp overflows in float64; the certainty is 1 long before.
    distance = np.abs(np.clip(difference, -700, 700))
    certainty = 1 / (1 + np.exp(-distance))

    # The last bin includes a certainty of exactly 1.
    scaled = (certainty - 0.5) * (2 * CALIBRATION_BINS)
    bins = np.minimum(scaled.astype(np.int64), CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, is_right - certainty, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(is_right))
