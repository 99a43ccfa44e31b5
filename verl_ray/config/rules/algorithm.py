"""Rules of the algorithm: its advantages, its losses, and the penalty for divergence.

Invariant: no algorithm is named. What each choice needs and reads is what
`verl_ray/algorithms` declares. Deliberately not here: the declarations, and the
formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.catalogue import CHOICES, KL_ESTIMATORS, declared_settings
from verl_ray.algorithms.correction import CORRECTIONS
from verl_ray.algorithms.policy_loss_choices import POLICY_LOSSES
from verl_ray.algorithms.row_weights import AGGREGATIONS, HORIZON
from verl_ray.config.rules.rule import (
    OverriddenKeys,
    follow_reference,
    set_exactly_when,
)
from verl_ray.config.suggest import either
from verl_ray.errors import Problem

if TYPE_CHECKING:  # it imports this module
    from verl_ray.config.tasks.rl import RLConfig


def group_baseline_has_a_group(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if a group baseline has a single response per group."""
    advantage = config.algorithm.advantage
    group_size = config.rollout.group_size

    # A single response has no other one to be compared with.
    if ADVANTAGES[advantage].needs_group and group_size < 2:
        rule = (
            f"algorithm.advantage={advantage} compares the responses to one prompt with"
            " each other"
        )
        fix = (
            "Use at least 2 (8 is usual), or algorithm=ppo or"
            " algorithm=reinforce_plus_plus."
        )
        yield Problem("rollout.group_size", group_size, rule, fix)


def settings_are_read(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each declared setting that is set and not read, or not set.

    A setting is read when one of the algorithm's choices declares it.
    """
    algorithm = config.algorithm
    chosen = {key: table[getattr(algorithm, key)] for key, table in CHOICES.items()}

    for setting, choice_keys in declared_settings().items():
        key = f"algorithm.{setting.name}"
        value = getattr(algorithm, setting.name)
        readers = [name for name in choice_keys if setting in chosen[name].reads]

        # A refusal names the choices that read the setting, or those that could.
        because = " and ".join(
            f"algorithm.{name}={chosen[name].name}" for name in readers or choice_keys
        )

        if not readers:
            yield from set_exactly_when(False, key, value, because, None)
            continue

        # No usual value means that null is a choice, too.
        usual = chosen[readers[0]].reads[setting]
        if usual is not None:
            recommended = follow_reference(config, usual)
            yield from set_exactly_when(True, key, value, because, recommended)


def critic_matches_the_advantage(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem unless there is a value loss exactly when a critic is needed."""
    key = "algorithm.value_loss"
    advantage = config.algorithm.advantage
    value_loss = config.algorithm.value_loss
    needs_critic = ADVANTAGES[advantage].needs_critic
    because = f"algorithm.advantage={advantage}"

    if needs_critic and value_loss is None:
        rule = f"{because} needs a critic, which learns by it"
        fix = (
            "Set algorithm.value_loss={clip: 0.2, aggregation: token_mean}, or another"
            " algorithm.advantage."
        )
        yield Problem(key, None, rule, fix)

    if not needs_critic and value_loss is not None:
        rule = f"{because} uses no critic"
        fix = "Set algorithm.value_loss=null, or algorithm=ppo."
        yield Problem(key, value_loss.model_dump(), rule, fix)


def kl_is_complete(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting of the penalty that is missing or not used."""
    kl = config.algorithm.kl
    is_charged = kl.place != "none"
    because = f"algorithm.kl.place={kl.place}"
    usual_values: dict[str, object] = {
        "estimator": "k3",
        "coefficient": 0.001,
        "controller": "fixed",
    }

    for field, usual in usual_values.items():
        key = f"algorithm.kl.{field}"
        value = getattr(kl, field)
        yield from set_exactly_when(is_charged, key, value, because, usual)


def kl_in_the_loss_has_a_gradient(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if the estimator of a KL loss has no gradient in expectation."""
    kl = config.algorithm.kl
    if kl.place != "loss" or kl.estimator is None:
        return

    if not KL_ESTIMATORS[kl.estimator].has_gradient:
        rule = (
            f"as a loss, the expected gradient of {kl.estimator} is zero: it would only"
            " add noise"
        )
        fix = "Use k2 or k3, or algorithm.kl.place=reward."
        yield Problem("algorithm.kl.estimator", kl.estimator, rule, fix)


def kl_in_the_reward_has_no_gradient(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each choice that only changes the gradient of a KL loss."""
    kl = config.algorithm.kl
    if kl.place == "loss":
        return

    because = f"algorithm.kl.place={kl.place} has no gradient, which alone this changes"
    if kl.importance_weighted:
        fix = "Set it to false, or use algorithm.kl.place=loss."
        yield Problem("algorithm.kl.importance_weighted", True, because, fix)

    if kl.estimator is not None:
        same_values = KL_ESTIMATORS[kl.estimator].reward_form
        if same_values is not None:
            fix = f"Use {same_values}, which has the same values."
            yield Problem("algorithm.kl.estimator", kl.estimator, because, fix)


def losses_without_a_ratio_update_once(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if a loss without a ratio has several updates per step."""
    actor = config.actor
    policy_loss = config.algorithm.policy_loss
    rows = config.data.prompts_per_step * config.rollout.group_size

    if POLICY_LOSSES[policy_loss].has_ratio or _correction_weighs_updates(config):
        return

    rule = (
        f"{policy_loss} has no ratio that would correct a second update on the same"
        " rollouts"
    )
    with_ratio = [loss.name for loss in POLICY_LOSSES.values() if loss.has_ratio]
    alternative = f"use algorithm.policy_loss={either(with_ratio)}"

    # Further epochs and smaller mini-batches both make further updates.
    if actor.epochs > 1:
        fix = f"Set it to 1, or {alternative}."
        yield Problem("actor.epochs", actor.epochs, rule, fix)

    if actor.mini_batch_size is not None and actor.mini_batch_size < rows:
        fix = f"Set it to null or {rows}, or {alternative}."
        yield Problem("actor.mini_batch_size", actor.mini_batch_size, rule, fix)


def ratios_are_not_one(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem if a loss of ratios compares the policy with itself."""
    loss = POLICY_LOSSES[config.algorithm.policy_loss]
    updates = config.actor.updates_per_step(config.rows_per_step)
    # A correction that waits for a mismatch is not there from the first step on.
    waits = config.algorithm.mismatch.then == "correct"
    compares_with_sampler = (
        config.algorithm.correction.form == "two_policy" and not waits
    )
    if not loss.needs_another_policy or updates > 1 or compares_with_sampler:
        return

    quarter = max(config.rows_per_step // 4, 1)
    rule = (
        f"with one update per step the ratio of {loss.name} is 1 at every token, so it"
        " is the plain policy gradient"
    )
    fix = (
        f"Make several updates, as its paper does: actor.mini_batch_size={quarter}."
        " Or compare with the sampler's policy: algorithm.correction.form=two_policy."
    )
    yield Problem("algorithm.policy_loss", loss.name, rule, fix)


def selections_have_log_probs(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem if tokens are chosen by log-probs that no policy has."""
    algorithm = config.algorithm
    if not algorithm.chooses_tokens or config.rollout.kv != "keep":
        return

    key, value = "policy_loss", algorithm.policy_loss
    if algorithm.entropy_share is not None:
        key, value = "entropy_share", str(algorithm.entropy_share)
    rule = (
        "tokens are chosen by what the policy before the step says of them, and with"
        " rollout.kv=keep nothing but the sampler's log-probs is known"
    )
    fix = "Use rollout.kv=recompute, or leave this out."
    yield Problem(f"algorithm.{key}", value, rule, fix)


def estimators_have_probabilities(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if an estimator reads probabilities that no policy has."""
    advantage = ADVANTAGES[config.algorithm.advantage]
    if not advantage.reads_probabilities or config.rollout.kv != "keep":
        return

    rule = (
        "it reads probabilities of the policy before the step, and with rollout.kv=keep"
        " nothing but the sampler's log-probs is known"
    )
    fix = "Use rollout.kv=recompute, or another algorithm such as algorithm=rloo."
    yield Problem("algorithm.advantage", advantage.name, rule, fix)


def entropy_control_is_complete(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each missing or unused setting of the adaptive bonus."""
    algorithm = config.algorithm
    has_target = algorithm.entropy_target is not None
    because = "algorithm.entropy_target=" + ("..." if has_target else "null")
    key = "algorithm.entropy_step"
    yield from set_exactly_when(has_target, key, algorithm.entropy_step, because, 0.005)
    key = "algorithm.entropy_max"
    yield from set_exactly_when(has_target, key, algorithm.entropy_max, because, 1.0)


def _correction_weighs_updates(config: RLConfig) -> bool:
    """Return whether a correction weighs every update by its ratio to the sampler."""
    correction = config.algorithm.correction
    if correction.form != "two_policy":
        return False

    # A correction that waits for a mismatch is not there from the first step on.
    if config.algorithm.mismatch.then == "correct":
        return False

    if correction.kind is None:
        return True
    return CORRECTIONS[correction.kind].weights_by_ratio


def kl_controller_is_complete(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting of the controller that is missing or unused."""
    kl = config.algorithm.kl
    is_adaptive = kl.controller == "adaptive"

    if is_adaptive and kl.place == "loss":
        rule = (
            "the adaptive controller steers a penalty in the reward, not one in the"
            " loss"
        )
        fix = "Use fixed, or algorithm.kl.place=reward."
        yield Problem("algorithm.kl.controller", kl.controller, rule, fix)

    controller = "null" if kl.controller is None else kl.controller
    because = f"algorithm.kl.controller={controller}"
    key = "algorithm.kl.target"
    yield from set_exactly_when(is_adaptive, key, kl.target, because, 6.0)
    key = "algorithm.kl.horizon"
    yield from set_exactly_when(is_adaptive, key, kl.horizon, because, 10_000)


def value_losses_have_no_horizon(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if the value loss is aggregated by a horizon."""
    value_loss = config.algorithm.value_loss
    if value_loss is None:
        return

    aggregation = value_loss.aggregation
    if HORIZON in AGGREGATIONS[aggregation].reads:
        key = "algorithm.value_loss.aggregation"
        rule = "the value loss has no horizon to normalise by"
        fix = "Use token_mean or seq_mean_token_mean."
        yield Problem(key, aggregation, rule, fix)


def bootstrapping_needs_values(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if cut responses are bootstrapped and there is no critic."""
    advantage = config.algorithm.advantage
    if config.algorithm.truncated != "bootstrap":
        return

    if not ADVANTAGES[advantage].needs_critic:
        rule = (
            "a cut response is bootstrapped from a critic, and"
            f" algorithm.advantage={advantage} has none"
        )
        fix = "Use score or mask, or algorithm=ppo."
        yield Problem("algorithm.truncated", "bootstrap", rule, fix)


def algorithm_is_chosen_as_a_group(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if the user set the algorithm's name instead of choosing it."""
    # The name comes with the YAML file of the choice.
    if overridden.under("algorithm.name"):
        name = config.algorithm.name
        rule = "the name is a label and changes nothing"
        fix = f"Choose an algorithm with algorithm={name}."
        yield Problem("algorithm.name", name, rule, fix)
