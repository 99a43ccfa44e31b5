"""Rules of the algorithm: advantages, losses, the penalty for divergence, and what they need of each other.

Invariant: each setting of an algorithm has a value exactly when its formula reads it. Deliberately not here: the
formulas (`verl_ray.algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.config.rules.rule import Overridden, iff
from verl_ray.config.schema import RLConfig
from verl_ray.errors import Problem

GROUP_BASELINES = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"})
"""Advantages that compare the responses to one prompt with each other."""

DISCOUNTED = frozenset({"gae", "reinforce_plus_plus"})
"""Advantages computed per token, with a discount."""


def group_baseline_has_a_group(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    if config.algorithm.advantage in GROUP_BASELINES and config.rollout.group_size < 2:
        yield Problem(
            "rollout.group_size",
            config.rollout.group_size,
            f"algorithm.advantage={config.algorithm.advantage} compares the responses to one prompt with each other",
            "Use at least 2 (8 is usual), or algorithm=ppo or algorithm=reinforce_plus_plus.",
        )


def advantage_has_its_settings(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    wants = {"gamma": algorithm.advantage in DISCOUNTED, "lam": algorithm.advantage == "gae"}
    for field, wanted in wants.items():
        value = getattr(algorithm, field)
        usual = 1.0 if field == "gamma" else 0.95
        yield from iff(wanted, f"algorithm.{field}", value, f"algorithm.advantage={algorithm.advantage}", usual)


def gae_has_a_critic(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    needs = algorithm.advantage == "gae"
    if needs and algorithm.value_loss is None:
        fix = "Set algorithm.value_loss={clip: 0.2, aggregation: token_mean}, or another algorithm.advantage."
        yield Problem("algorithm.value_loss", None, "algorithm.advantage=gae needs a critic, which learns by it", fix)
    if not needs and algorithm.value_loss is not None:
        rule = f"algorithm.advantage={algorithm.advantage} uses no critic"
        fix = "Set algorithm.value_loss=null, or algorithm=ppo."
        yield Problem("algorithm.value_loss", algorithm.value_loss.model_dump(), rule, fix)


def kl_is_complete(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    kl = config.algorithm.kl
    charged = kl.place != "none"
    because = f"algorithm.kl.place={kl.place}"
    usual: dict[str, object] = {"estimator": "k3", "coefficient": 0.001, "controller": "fixed"}
    for field, value in usual.items():
        yield from iff(charged, f"algorithm.kl.{field}", getattr(kl, field), because, value)


def kl_in_the_loss_has_a_gradient(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    kl = config.algorithm.kl
    if kl.place == "loss" and kl.estimator == "k1":
        rule = "as a loss, the expected gradient of k1 is zero: it would only add noise"
        yield Problem("algorithm.kl.estimator", kl.estimator, rule, "Use k2 or k3, or algorithm.kl.place=reward.")


def reinforce_updates_once(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    actor, rows = config.actor, config.data.prompts_per_step * config.rollout.group_size
    algorithm = config.algorithm
    weighed = algorithm.correction.form == "two_policy" and algorithm.correction.kind != "reject"
    if algorithm.policy_loss != "reinforce" or (weighed and algorithm.mismatch.then != "correct"):
        return
    rule = "reinforce has no ratio that would correct a second update on the same rollouts"
    if actor.epochs > 1:
        yield Problem("actor.epochs", actor.epochs, rule, "Set it to 1, or use algorithm.policy_loss=ppo_clip.")
    if actor.mini_batch_size is not None and actor.mini_batch_size < rows:
        fix = f"Set it to null or {rows}, or use algorithm.policy_loss=ppo_clip."
        yield Problem("actor.mini_batch_size", actor.mini_batch_size, rule, fix)


def kl_controller_is_complete(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    kl = config.algorithm.kl
    adaptive = kl.controller == "adaptive"
    if adaptive and kl.place == "loss":
        rule = "the adaptive controller steers a penalty in the reward, not one in the loss"
        yield Problem("algorithm.kl.controller", kl.controller, rule, "Use fixed, or algorithm.kl.place=reward.")
    because = f"algorithm.kl.controller={'null' if kl.controller is None else kl.controller}"
    yield from iff(adaptive, "algorithm.kl.target", kl.target, because, 6.0)
    yield from iff(adaptive, "algorithm.kl.horizon", kl.horizon, because, 10_000)


def clipping_belongs_to_ppo(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    clipped = algorithm.policy_loss == "ppo_clip"
    because = f"algorithm.policy_loss={algorithm.policy_loss}"
    yield from iff(clipped, "algorithm.clip_low", algorithm.clip_low, because, 0.2)
    yield from iff(clipped, "algorithm.clip_high", algorithm.clip_high, because, 0.2)
    if not clipped and algorithm.dual_clip is not None:
        yield from iff(False, "algorithm.dual_clip", algorithm.dual_clip, because, None)


def horizon_belongs_to_its_aggregation(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    yield from iff(
        algorithm.aggregation == "seq_mean_token_sum_norm",
        "algorithm.aggregation_horizon",
        algorithm.aggregation_horizon,
        f"algorithm.aggregation={algorithm.aggregation}",
        config.rollout.max_response_tokens,
    )
    if algorithm.value_loss is not None and algorithm.value_loss.aggregation == "seq_mean_token_sum_norm":
        rule = "the value loss has no horizon to normalise by"
        key = "algorithm.value_loss.aggregation"
        yield Problem(key, algorithm.value_loss.aggregation, rule, "Use token_mean or seq_mean_token_mean.")


def bootstrapping_needs_values(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.truncated == "bootstrap" and algorithm.advantage != "gae":
        rule = f"a cut response is bootstrapped from a critic, and algorithm.advantage={algorithm.advantage} has none"
        yield Problem("algorithm.truncated", "bootstrap", rule, "Use score or mask, or algorithm=ppo.")


def algorithm_name_is_its_group(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if overridden.under("algorithm.name"):
        name = config.algorithm.name
        rule = "the name is a label and changes nothing"
        yield Problem("algorithm.name", name, rule, f"Choose an algorithm with algorithm={name}.")
