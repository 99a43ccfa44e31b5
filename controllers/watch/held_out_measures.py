"""Metrics of evaluations on held-out rows.

Invariant: pure functions of the scores of held-out responses.

Deliberately not here: generating and scoring these responses
(`controllers/rollouts/evaluator.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np
import numpy.typing as npt

from controllers.watch.measures import Metrics, spread
from verl_ray.rewards.shaping import ResponseScores
from verl_ray.tracking.base import HELD_OUT

Float64s = npt.NDArray[np.float64]

CALIBRATION_BINS = 10

PAIR_ACCURACY = "val-core/held_out/pair_accuracy"
LOG_LOSS = "val-core/held_out/log_loss"


def metric_name(source: str, group_size: int, *, right_or_wrong: bool) -> str:
    """Return the name of the metric of a data source: acc/mean@N or reward/mean@N.

    Args:
        source: Name of the data source.
        group_size: Number of responses per prompt.
        right_or_wrong: Whether scores are between wrong (0) and right (1). Otherwise
            they may have any scale.
    """
    kind = "acc" if right_or_wrong else "reward"
    return f"{HELD_OUT}{source}/{kind}/mean@{group_size}"


def accuracy(
    sources: Sequence[str], scores: ResponseScores, group_size: int
) -> Metrics:
    """Return val-core/<data source>/acc/mean@N, the mean score per data source.

    Failed scores count as wrong.

    Args:
        sources: Data source of each response, [rows].
        scores: Scores from 0 to 1 of the responses.
        group_size: Number of responses per prompt.
    """
    names = np.array(sources)
    values = np.where(scores.ok, scores.score, 0)

    metrics: Metrics = {}
    for name in sorted(set(sources)):
        mean = float(values[names == name].mean())
        metrics[metric_name(name, group_size, right_or_wrong=True)] = mean
    return metrics


def held_out_rewards(
    sources: Sequence[str], scores: ResponseScores, group_size: int
) -> Metrics:
    """Return val-core/<data source>/reward/mean@N, the mean score per data source.

    These scores are not confined to 0 to 1, so failed ones are left out.

    Args:
        sources: Data source of each response, [rows].
        scores: Scores of the responses.
        group_size: Number of responses per prompt.
    """
    names = np.array(sources)

    metrics: Metrics = {}
    for name in sorted(set(sources)):
        values = scores.score[(names == name) & scores.ok]
        mean = nan
        if len(values):
            mean = float(values.mean())
        metrics[metric_name(name, group_size, right_or_wrong=False)] = mean
    return metrics


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
