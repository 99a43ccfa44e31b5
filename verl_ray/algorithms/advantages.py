"""Advantages: how much better than expected each response, or each token, was.

Here are those that look at single responses, and the table of all. Others compare with
the responses to the same prompt (`group_baselines.py`) or with earlier ones of the same
agent (`agent_baselines.py`). Below each function stand its settings and its
declaration. Functions take the response tokens of many rows laid end to end, row r at
[offsets[r], offsets[r + 1]), in NumPy, and loop over neither rows nor tokens.

Invariant: a pure function of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verl_ray.algorithms.agent_baselines import RAE
from verl_ray.algorithms.declaration import Setting, by_name
from verl_ray.algorithms.discounting import Float64, discounted_sums
from verl_ray.algorithms.estimators import (
    Advantage,
    CriticBaseline,
    GroupBaseline,
    NoBaseline,
)
from verl_ray.algorithms.group_baselines import GROUP_BASELINES
from verl_ray.algorithms.own_functions import (
    Choices,
    OwnFunction,
    as_numbers_of_rows,
    keywords_of,
)
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Float32
from verl_ray.settings.function_specs import in_words
from verl_ray.settings.section import Fraction, PositiveFloat


def gae(
    rewards: Float32,
    values: Float32,
    offsets: Int64,
    bootstrap: Float32,
    gamma: float,
    lam: float,
) -> tuple[Float32, Float32]:
    """Generalized advantage estimation, computed in float64.

    With delta_t = r_t + gamma * v_{t+1} - v_t, the advantage is A_t = sum over k of
    (gamma * lam)^k * delta_{t+k}, and the return is A_t + v_t.

    Source: arXiv:1506.02438, eqs. 11, 12 and 16.

    Args:
        rewards: float32 [T] over response tokens.
        values: float32 [T], `values[t]` is the value before token t.
        offsets: int64 [rows + 1].
        bootstrap: float32 [rows], the value after the last token; 0 if the response
            ended by itself.
        gamma: The discount.
        lam: The lambda of the estimator.

    Returns:
        Advantages and returns, float32 [T] each.
    """
    baseline = values.astype(np.float64)
    errors = _prediction_errors(rewards, baseline, offsets, bootstrap, gamma)
    advantages = discounted_sums(errors, offsets, float(gamma * lam))
    returns = advantages + baseline
    return advantages.astype(np.float32), returns.astype(np.float32)


GAMMA = Setting("gamma", Fraction, "Discount.")
LAM = Setting("lam", Fraction, "GAE's lambda.")

GAE = CriticBaseline(
    name="gae",
    paper="GAE (arXiv:1506.02438)",
    function=gae,
    reads={GAMMA: 1.0, LAM: 0.95},
)


def length_adaptive_gae(
    rewards: Float32,
    values: Float32,
    offsets: Int64,
    bootstrap: Float32,
    gamma: float,
    lam_alpha: float,
    lam_critic: float,
) -> tuple[Float32, Float32]:
    """GAE whose lambda is 1 - 1 / (lam_alpha * length) for the policy, at least 0.

    So the errors of a long response are summed over as large a part of it as those of a
    short one. The critic's targets have the lambda `lam_critic`. Arguments and results
    are those of `gae`.

    Source: VAPO (arXiv:2504.05118, eqs. 5 to 7), with 0.05, and 1 for the critic.
    """
    baseline = values.astype(np.float64)
    errors = _prediction_errors(rewards, baseline, offsets, bootstrap, gamma)

    length = np.maximum(np.diff(offsets), 1)
    lam = (1 - 1 / (lam_alpha * length)).clip(min=0)
    advantages = discounted_sums(errors, offsets, gamma * lam)
    returns = discounted_sums(errors, offsets, float(gamma * lam_critic)) + baseline
    return advantages.astype(np.float32), returns.astype(np.float32)


LAM_ALPHA = Setting(
    "lam_alpha",
    PositiveFloat,
    "The policy's lambda is 1 - 1 / (lam_alpha * response length).",
)
LAM_CRITIC = Setting("lam_critic", Fraction, "Lambda of the critic's targets.")

LENGTH_ADAPTIVE_GAE = CriticBaseline(
    name="length_adaptive_gae",
    paper="VAPO (arXiv:2504.05118)",
    function=length_adaptive_gae,
    reads={GAMMA: 1.0, LAM_ALPHA: 0.05, LAM_CRITIC: 1.0},
)


def _prediction_errors(
    rewards: Float32,
    baseline: Float64,
    offsets: Int64,
    bootstrap: Float32,
    gamma: float,
) -> Float64:
    """Return r_t + gamma * v_{t+1} - v_t, float64 [T]; see `gae`."""
    # The value after each token: that before the next one, or the bootstrap.
    delta = np.empty_like(baseline)
    delta[:-1] = baseline[1:]
    has_tokens = offsets[1:] > offsets[:-1]
    last_tokens = offsets[1:][has_tokens] - 1
    delta[last_tokens] = bootstrap[has_tokens]

    # In place, since there may be many tokens.
    delta *= gamma
    delta += rewards
    delta -= baseline
    return delta


def discounted_returns(rewards: Float32, offsets: Int64, gamma: float) -> Float32:
    """G_t = r_t + gamma * G_{t+1} within each row, computed in float64.

    Arguments and result, float32 [T], are as for `gae`.

    REINFORCE++ (arXiv:2501.03262) takes these as advantages, with the divergence from
    the reference charged in the rewards, and whitens them over the step
    (algorithm.whiten_advantages).
    """
    returns = discounted_sums(rewards.astype(np.float64), offsets, gamma)
    return returns.astype(np.float32)


REINFORCE_PLUS_PLUS = NoBaseline(
    name="reinforce_plus_plus",
    paper="REINFORCE++ (arXiv:2501.03262)",
    function=discounted_returns,
    reads={GAMMA: 1.0},
)


def no_advantages(rewards: Float32, offsets: Int64) -> Float32:
    """Return 0 for each token: rewards teach nothing, and a teacher does."""
    return np.zeros_like(rewards)


NONE = NoBaseline(
    name="none", paper="none: a teacher's divergence alone", function=no_advantages
)


# -------------------------------------------------------------------------- all of them


_ROW_VALUES = ("trajectory", "length", "parts")


def own_baseline(spec: str, settings: Mapping[Setting, object]) -> GroupBaseline:
    """Return the group baseline of a user's own function.

    It takes (rewards, group, valid) as `grpo` does, then keyword arguments: any of
    trajectory, length, parts and the settings. It returns float32 [rows].

    Raises:
        OwnFunctionMistake: It cannot be one.
    """
    reads, others = keywords_of(
        spec, ("rewards", "group", "valid"), settings, _ROW_VALUES
    )
    return GroupBaseline(
        name=in_words(spec),
        paper="your own",
        function=OwnFunction(spec, as_numbers_of_rows),
        reads=reads,
        reads_length="length" in others,
        reads_parts="parts" in others,
        reads_trajectory="trajectory" in others,
    )


_DECLARED: dict[str, Advantage] = by_name(
    GAE, LENGTH_ADAPTIVE_GAE, *GROUP_BASELINES, REINFORCE_PLUS_PLUS, RAE, NONE
)

ADVANTAGES: Choices[Advantage] = Choices(_DECLARED, own_baseline)
"""Every choice of `algorithm.advantage`, by its name."""
