"""Two lines of `check` about the algorithm: what it is, and what it is made of.

Deliberately not here: whether its parts fit together (`verl_ray/config/rules`).
"""

from __future__ import annotations

from collections.abc import Iterator

from controllers.compose.listing import groups
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.catalogue import CHOICES
from verl_ray.algorithms.policy_loss_choices import POLICY_LOSSES
from verl_ray.config.algorithm import ADDITIONS, AlgorithmConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig

_OWN = "an algorithm of your own"


def algorithm_lines(config: Config) -> list[str]:
    """Return two lines about the algorithm; none for a task without one."""
    if not isinstance(config, RLConfig):
        return []
    algorithm = config.algorithm
    about = groups()["algorithm"].get(algorithm.name) or _OWN
    return [f"algorithm {algorithm.name}: {about}", f"  {'; '.join(_parts(config))}"]


def _parts(config: RLConfig) -> Iterator[str]:
    algorithm = config.algorithm
    advantage = ADVANTAGES[algorithm.advantage]
    whitened = ", whitened" if algorithm.whiten_advantages else ""
    unit = "response" if advantage.level == "row" else "token"
    settings = _settings(algorithm, "advantage")
    yield f"advantage {advantage.name} per {unit}{whitened}{settings}"

    loss = POLICY_LOSSES[algorithm.policy_loss]
    ratio = ""
    if loss.has_ratio:
        unit = algorithm.sequence if loss.sequence == "row" else loss.sequence
        ratio = f", ratio of a {unit} to {_old_policy(config)}"
    yield f"loss {loss.name}{_settings(algorithm, 'policy_loss')}{ratio}"

    yield f"sum {algorithm.aggregation}"
    kl = algorithm.kl
    if kl.place == "none":
        yield "no KL"
    else:
        yield f"KL {kl.estimator} in the {kl.place}, {kl.coefficient:g} per nat"

    additions = [name for name in ADDITIONS if getattr(algorithm, name) is not None]
    if additions:
        yield ", ".join(_in_words(algorithm, name) for name in additions)


def _in_words(algorithm: AlgorithmConfig, name: str) -> str:
    value = getattr(algorithm, name)
    return f"{name}={value if isinstance(value, str) else format(value, 'g')}"


def _old_policy(config: RLConfig) -> str:
    """Return in words which policy the loss compares with."""
    if config.algorithm.correction.form == "two_policy":
        return "the sampler"
    if config.actor.updates_per_step(config.rows_per_step) > 1:
        return "the policy before the step"
    return "itself (one update per step)"


def _settings(algorithm: AlgorithmConfig, key: str) -> str:
    """Return the settings that a choice reads, in brackets."""
    choice = CHOICES[key][getattr(algorithm, key)]
    values = {
        setting.name: getattr(algorithm, setting.name) for setting in choice.reads
    }
    named = [f"{name}={value:g}" for name, value in values.items() if value is not None]
    return f" ({', '.join(named)})" if named else ""
