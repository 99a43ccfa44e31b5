"""A trial of the user's own functions that learning calls, on four rows or pairs.

Each function is called as a step would call it: an advantage and a shaping with the
scores 1, 0, 0.5 and 0 of one group, a loss with advantages of 1 and -1 at ratios of 1
and of e^0.5, and a loss of pairs with log ratios on both sides of the reference. What
it returns is checked as in a step, and shown.

Invariant: user's code runs in a process that is killed at its deadline, never in this
one.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl_ray.algorithms.own_functions import is_own
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.preference import PreferenceLossConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.dpo import DPOConfig
from verl_ray.config.tasks.rl import RLConfig
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
REJECTED_LOG_RATIOS = (0.0, 0.5, 0.0, 1.0)
LOG_PROB, TOKENS, REJECTED_TOKENS = -3.0, 3.0, 6.0
"""Of a response by the reference, and the lengths of both responses of a pair."""

_Section = AlgorithmConfig | PreferenceLossConfig

_SECTIONS: dict[str, type[_Section]] = {
    "algorithm": AlgorithmConfig,
    "preference": PreferenceLossConfig,
}


def sections_of_functions(config: Config) -> dict[str, _Section]:
    """Return the sections that may name functions, by their keys."""
    sections: dict[str, _Section] = {}
    if isinstance(config, RLConfig):
        sections["algorithm"] = config.algorithm
    if isinstance(config, RLConfig | DPOConfig) and config.preference is not None:
        sections["preference"] = config.preference
    return sections


def try_functions(name: str, section: _Section) -> Trials:
    """Try the functions of a section that are the user's own.

    Args:
        name: The key of the section.
        section: The section, which breaks no rule.
    """
    specs = dict(_own_functions(name, section))
    if not specs:
        return Trials()

    lines: list[str] = []
    problems: list[Problem] = []
    with blocking(f"trying {' and '.join(specs)} on four rows"):
        # Those of a task's own beside them are none of the loss.
        read = set(_SECTIONS[name].model_fields)
        fields = {"name": name, "section": section.model_dump_json(include=read)}
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


def _own_functions(name: str, section: _Section) -> Iterator[tuple[str, str]]:
    """Yield the key and the spec of each function that is the user's own."""
    for key in _CALLS:
        # The settings of the other section are none of this one's.
        owner, _, setting = key.partition(".")
        spec = getattr(section, setting) if owner == name else None
        if spec is not None and is_own(spec):
            yield key, spec


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
    name = fields["name"]
    section = _SECTIONS[name].model_validate_json(fields["section"])
    for key, _ in _own_functions(name, section):
        try:
            tell(key, _CALLS[key](section))
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
    _require_finite(choice.name, loss.tolist(), gradient.tolist())
    return {
        "advantage": advantages.tolist(),
        "ratio": torch.tensor(LOG_RATIOS).exp().tolist(),
        "loss": loss.tolist(),
        "gradient": gradient.tolist(),
    }


def _preference_losses(preference: PreferenceLossConfig) -> dict[str, list[float]]:
    import torch

    from verl_ray.algorithms.preference_losses import Pairs

    def column(value: float) -> torch.Tensor:
        return torch.full((len(LOG_RATIOS),), value, dtype=torch.float64)

    chosen = (column(LOG_PROB) + torch.tensor(LOG_RATIOS)).requires_grad_()
    rejected = (column(LOG_PROB) + torch.tensor(REJECTED_LOG_RATIOS)).requires_grad_()
    pairs = Pairs(
        chosen,
        rejected,
        column(LOG_PROB),
        column(LOG_PROB),
        column(TOKENS),
        column(REJECTED_TOKENS),
    )
    choice = preference.declared
    loss = choice.function(pairs, **choice.settings(preference))
    gradients = torch.autograd.grad(
        loss.sum(), (chosen, rejected), allow_unused=True, materialize_grads=True
    )
    columns = {
        "chosen log ratio": list(LOG_RATIOS),
        "rejected log ratio": list(REJECTED_LOG_RATIOS),
        "loss": loss.tolist(),
        "gradient of chosen": gradients[0].tolist(),
        "gradient of rejected": gradients[1].tolist(),
    }
    _require_finite(choice.name, *list(columns.values())[2:])
    return columns


def _require_finite(name: str, *columns: list[float]) -> None:
    """Refuse losses and gradients that are not finite.

    Raises:
        DataError: Some are not.
    """
    if not all(math.isfinite(value) for column in columns for value in column):
        raise DataError(
            f"{name} has a loss or a gradient that is not finite:"
            f" {', '.join(map(str, columns))}"
        )


_CALLS: dict[str, Callable[[Any], dict[str, list[float]]]] = {
    "algorithm.shaping": _shaped,
    "algorithm.advantage": _advantages,
    "algorithm.policy_loss": _losses,
    "preference.loss": _preference_losses,
}
"""The call of each setting that may name a function of the user's."""
