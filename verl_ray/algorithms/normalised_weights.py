"""The mean of a correction's weights over a whole mini-batch, before it learns.

Weights that are divided by it have the mean 1, so that a correction changes which
tokens count and not how much all of them do together. It is computed from log-probs of
before the step, so it depends on neither micro-batches nor ranks.

Invariant: a constant for the gradient, the same on all ranks. Deliberately not here:
the weights (`correction.py`), and what they weight (`policy_objective.py`).
"""

from __future__ import annotations

import numpy as np
import torch

from verl_ray.algorithms.correction import CORRECTION_PREFIX, correction_weights
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.data.stages import Credit, LogProbs, Rollouts
from verl_ray.errors import DataError
from verl_ray.ops.order_statistics import Total


def mean_weight(
    algorithm: AlgorithmConfig,
    rows: Rollouts,
    credit: Credit,
    old: LogProbs | None,
    total: Total,
) -> float:
    """Return the mean weight of a mini-batch; 1 where all weights are 0.

    It is the mean over the tokens that are learned from, or over the sequences if the
    ratio is one of sequences. A token that the kind of correction leaves out has the
    weight 0 and counts; what rejections leave out besides changes nothing. Every rank
    has to call this.

    Source: `rollout_is_batch_normalize` of verl, which also divides by the mean after
    truncation: self-normalised importance sampling. Deviation: there the mean is one
    of all rows at hand when weights are computed; here it is that of each mini-batch.

    Args:
        algorithm: The section `algorithm` of the configuration.
        rows: This rank's rows of the mini-batch.
        credit: Their credit.
        old: Log-probs of the policy before the step.
        total: Sums an array over all ranks.

    Raises:
        DataError: The old log-probs are missing.
    """
    if old is None:
        raise DataError(
            "algorithm.correction.normalise needs the log-probs of the policy before"
            " the step, which were not computed"
        )

    places = np.flatnonzero(rows.response_mask & credit.in_loss[rows.row_of_token])
    sequence = rows.row_of_token[places]
    if algorithm.judges_trajectories:
        # The tokens of a sequence are neighbours.
        sequence = rows.trajectory_id[sequence]
        order = np.argsort(sequence, kind="stable")
        places, sequence = places[order], sequence[order]
    log_ratio = old.log_probs[places] - rows.rollout_log_probs[places]
    weights = correction_weights(
        algorithm.correction.model_copy(update={"rejections": None}),
        torch.from_numpy(log_ratio),
        torch.from_numpy(sequence),
    )
    assert weights is not None, "the configuration requires a kind"

    # The share of a token in its sequence, or 1 if every token has a ratio of its own.
    share = weights.means[f"{CORRECTION_PREFIX}share"].double()
    own = [(share * weights.weight.double()).sum(), share.sum()]
    weight_sum, count = total(np.array([float(value) for value in own]))
    mean = weight_sum / count if count else 0.0
    # Not `<= 0`, which would hide a ratio that is NaN.
    return 1.0 if mean == 0 else float(mean)
