"""Rules of the algorithm: advantages, losses, the penalty for divergence, and what they need of each other.

Invariant: no algorithm is named; what each needs and reads is what `verl_ray/algorithms` declares. Deliberately not
here: the declarations, and the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.catalogue import (
    CHOICES,
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    settings,
)
from verl_ray.algorithms.row_weights import AGGREGATIONS, HORIZON
from verl_ray.config.rules.rule import Overridden, iff, resolved
from verl_ray.config.suggest import either
from verl_ray.errors import Problem

if TYPE_CHECKING:  # which name these rules
    from verl_ray.config.tasks.rl import RLConfig


def group_baseline_has_a_group(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    if ADVANTAGES[config.algorithm.advantage].needs_group and config.rollout.group_size < 2:
        yield Problem(
            "rollout.group_size",
            config.rollout.group_size,
            f"algorithm.advantage={config.algorithm.advantage} compares the responses to one prompt with each other",
            "Use at least 2 (8 is usual), or algorithm=ppo or algorithm=reinforce_plus_plus.",
        )


def settings_are_read(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    chosen = {key: table[getattr(algorithm, key)] for key, table in CHOICES.items()}
    for setting, keys in settings().items():
        value = getattr(algorithm, setting.name)
        readers = [key for key in keys if setting in chosen[key].reads]
        because = " and ".join(f"algorithm.{key}={chosen[key].name}" for key in readers or keys)
        if not readers:
            yield from iff(False, f"algorithm.{setting.name}", value, because, None)
            continue
        usual = chosen[readers[0]].reads[setting]
        if usual is not None:
            yield from iff(True, f"algorithm.{setting.name}", value, because, resolved(config, usual))


def critic_is_needed_and_there(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    because, needs = f"algorithm.advantage={algorithm.advantage}", ADVANTAGES[algorithm.advantage].needs_critic
    if needs and algorithm.value_loss is None:
        fix = "Set algorithm.value_loss={clip: 0.2, aggregation: token_mean}, or another algorithm.advantage."
        yield Problem("algorithm.value_loss", None, f"{because} needs a critic, which learns by it", fix)
    if not needs and algorithm.value_loss is not None:
        fix = "Set algorithm.value_loss=null, or algorithm=ppo."
        yield Problem("algorithm.value_loss", algorithm.value_loss.model_dump(), f"{because} uses no critic", fix)


def kl_is_complete(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    kl = config.algorithm.kl
    charged = kl.place != "none"
    because = f"algorithm.kl.place={kl.place}"
    usual: dict[str, object] = {"estimator": "k3", "coefficient": 0.001, "controller": "fixed"}
    for field, value in usual.items():
        yield from iff(charged, f"algorithm.kl.{field}", getattr(kl, field), because, value)


def kl_in_the_loss_has_a_gradient(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    kl = config.algorithm.kl
    if kl.place == "loss" and kl.estimator is not None and not KL_ESTIMATORS[kl.estimator].has_gradient:
        rule = f"as a loss, the expected gradient of {kl.estimator} is zero: it would only add noise"
        yield Problem("algorithm.kl.estimator", kl.estimator, rule, "Use k2 or k3, or algorithm.kl.place=reward.")


def losses_without_a_ratio_update_once(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    actor, rows = config.actor, config.data.prompts_per_step * config.rollout.group_size
    algorithm, correction = config.algorithm, config.algorithm.correction
    weighed = correction.form == "two_policy" and (correction.kind is None or CORRECTIONS[correction.kind].weighs)
    if POLICY_LOSSES[algorithm.policy_loss].has_ratio or (weighed and algorithm.mismatch.then != "correct"):
        return
    rule = f"{algorithm.policy_loss} has no ratio that would correct a second update on the same rollouts"
    others = f"algorithm.policy_loss={either(one.name for one in POLICY_LOSSES.values() if one.has_ratio)}"
    if actor.epochs > 1:
        yield Problem("actor.epochs", actor.epochs, rule, f"Set it to 1, or use {others}.")
    if actor.mini_batch_size is not None and actor.mini_batch_size < rows:
        yield Problem(
            "actor.mini_batch_size", actor.mini_batch_size, rule, f"Set it to null or {rows}, or use {others}."
        )


def kl_controller_is_complete(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    kl = config.algorithm.kl
    adaptive = kl.controller == "adaptive"
    if adaptive and kl.place == "loss":
        rule = "the adaptive controller steers a penalty in the reward, not one in the loss"
        yield Problem("algorithm.kl.controller", kl.controller, rule, "Use fixed, or algorithm.kl.place=reward.")
    because = f"algorithm.kl.controller={'null' if kl.controller is None else kl.controller}"
    yield from iff(adaptive, "algorithm.kl.target", kl.target, because, 6.0)
    yield from iff(adaptive, "algorithm.kl.horizon", kl.horizon, because, 10_000)


def value_losses_have_no_horizon(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    value_loss = config.algorithm.value_loss
    if value_loss is not None and HORIZON in AGGREGATIONS[value_loss.aggregation].reads:
        key, fix = "algorithm.value_loss.aggregation", "Use token_mean or seq_mean_token_mean."
        yield Problem(key, value_loss.aggregation, "the value loss has no horizon to normalise by", fix)


def bootstrapping_needs_values(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.truncated == "bootstrap" and not ADVANTAGES[algorithm.advantage].needs_critic:
        rule = f"a cut response is bootstrapped from a critic, and algorithm.advantage={algorithm.advantage} has none"
        yield Problem("algorithm.truncated", "bootstrap", rule, "Use score or mask, or algorithm=ppo.")


def algorithm_name_is_its_group(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if overridden.under("algorithm.name"):
        name = config.algorithm.name
        rule = "the name is a label and changes nothing"
        yield Problem("algorithm.name", name, rule, f"Choose an algorithm with algorithm={name}.")
