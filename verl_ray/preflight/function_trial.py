"""A trial of the user's own functions of `algorithm`, on four rows.

Each function is called as a step would call it: an advantage and a shaping with the
scores 1, 0, 0.5 and 0 of one group, a loss with advantages of 1 and -1 at ratios of 1
and of e^0.5. What it returns is checked as in a step, and shown.

Invariant: user's code runs in a process that is killed at its deadline, never in this
one.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

from verl_ray.algorithms.own_functions import is_own
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.errors import DataError, Problem
from verl_ray.preflight.trials import Trials
from verl_ray.processes.trial import Tell, run_trial, try_in_child
from verl_ray.profiling.phases import blocking
from verl_ray.settings.function_specs import in_words

DEADLINE_S = 120.0
"""Longest time that the import of torch and the calls of all functions may take."""

SCORES = (1.0, 0.0, 0.5, 0.0)
LENGTHS = (3, 6, 2, 5)
ADVANTAGES_OF_LOSS = (1.0, -1.0, 1.0, -1.0)
LOG_RATIOS = (0.0, 0.0, 0.5, 0.5)


def try_functions(algorithm: AlgorithmConfig) -> Trials:
    """Try the functions of `algorithm` that are the user's own.

    Args:
        algorithm: The section `algorithm` of the configuration, which breaks no rule.
    """
    specs = dict(_own_functions(algorithm))
    if not specs:
        return Trials()

    lines: list[str] = []
    problems: list[Problem] = []
    with blocking(f"trying {' and '.join(specs)} on four rows"):
        fields = {"algorithm": algorithm.model_dump_json()}
        messages, cause = try_in_child(__name__, fields, DEADLINE_S)
    outcomes = {message.kind: message.fields for message in messages}
    for key, spec in specs.items():
        outcome = outcomes.get(key)
        if outcome is None:
            rule = f"its process {cause} on four rows"
            fix = "Let it return at once; it may not end its process."
            problems.append(Problem(key, in_words(spec), rule, fix, may_pass=True))
        elif "failure" in outcome:
            fix = "Correct it: a step would call it like this."
            rule = f"on four rows {outcome['failure']}"
            problems.append(Problem(key, in_words(spec), rule, fix, may_pass=True))
        else:
            lines.append(f"{key}={in_words(spec)} on four rows:")
            lines += _table(outcome)
    return Trials(lines, problems)


def _own_functions(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the spec of each function that is the user's own."""
    for name in ("shaping", "advantage", "policy_loss"):
        spec = getattr(algorithm, name)
        if spec is not None and is_own(spec):
            yield f"algorithm.{name}", spec


def _table(columns: Mapping[str, list[float]]) -> Iterator[str]:
    """Yield a line for each column, numbers under each other."""
    width = max(map(len, columns))
    for name, values in columns.items():
        numbers = " ".join(f"{value:>9.4g}" for value in values)
        yield f"  {name:<{width}} {numbers}"


# -------------------------------------------------------------------- in that process


def main(connection: socket.socket) -> None:
    """Try the functions that the other end of a connection names."""
    run_trial(connection, _tried)


def _tried(fields: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Tell of each function what it makes of its rows; the result is empty."""
    algorithm = AlgorithmConfig.model_validate_json(fields["algorithm"])
    calls = {
        "algorithm.shaping": _shaped,
        "algorithm.advantage": _advantages,
        "algorithm.policy_loss": _losses,
    }
    for key, _ in _own_functions(algorithm):
        try:
            tell(key, calls[key](algorithm))
        except DataError as error:
            tell(key, {"failure": str(error)})
    return {}


def _shaped(algorithm: AlgorithmConfig) -> dict[str, list[float]]:
    import numpy as np

    from verl_ray.algorithms.reward_shaping import OWN_SHAPINGS, ScoredResponses

    score = np.array(SCORES, np.float32)
    assert algorithm.shaping is not None
    reward = OWN_SHAPINGS[algorithm.shaping].shape(
        algorithm,
        ScoredResponses(
            score=score,
            group=np.zeros(len(score), np.int64),
            valid=np.ones(len(score), bool),
            trajectory=np.arange(len(score)),
            length=np.array(LENGTHS, np.int64),
            truncated=np.arange(len(score)) == np.argmax(LENGTHS),
            parts=[(1.0, score)],
            max_tokens=max(LENGTHS),
        ),
    )
    return {
        "length": list(map(float, LENGTHS)),
        "score": list(SCORES),
        "reward": reward.tolist(),
    }


def _advantages(algorithm: AlgorithmConfig) -> dict[str, list[float]]:
    import numpy as np

    from verl_ray.algorithms.estimators import ResponseColumns
    from verl_ray.columns.stages import Finish
    from verl_ray.learning.credit import response_rewards

    rows = np.arange(len(SCORES))
    score = np.array(SCORES, np.float32)
    rewards = response_rewards(
        algorithm,
        score,
        np.ones(len(rows), bool),
        ResponseColumns(
            group_id=np.zeros(len(rows), np.int64),
            trajectory_id=rows,
            length=np.array(LENGTHS, np.int64),
            finish=np.full(len(rows), Finish.STOP, np.int8),
            is_last=rows == len(rows) - 1,
        ),
        None,
        parts=[(1.0, score)],
    )
    return {"score": list(SCORES), "advantage": rewards.advantage.tolist()}


def _losses(algorithm: AlgorithmConfig) -> dict[str, list[float]]:
    import torch

    from verl_ray.algorithms.losses import PolicyTokens
    from verl_ray.algorithms.policy_losses import POLICY_LOSSES

    choice = POLICY_LOSSES[algorithm.policy_loss]
    advantages = torch.tensor(ADVANTAGES_OF_LOSS)
    old = torch.full_like(advantages, -1.0)
    log_probs = (old + torch.tensor(LOG_RATIOS)).requires_grad_()
    tokens = PolicyTokens(log_probs, old, advantages, torch.arange(len(old)))
    loss = choice.function(tokens, **choice.settings(algorithm)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    if not torch.isfinite(torch.stack([loss.detach(), gradient])).all():
        raise DataError(
            f"{choice.name} has a loss or a gradient that is not finite:"
            f" {loss.tolist()}, {gradient.tolist()}"
        )
    return {
        "advantage": advantages.tolist(),
        "ratio": torch.tensor(LOG_RATIOS).exp().tolist(),
        "loss": loss.tolist(),
        "gradient": gradient.tolist(),
    }
