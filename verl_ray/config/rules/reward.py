"""Rules of rewards: functions, services, judges, mixtures.

Invariant: every response can get a score before the run gives up waiting for it.
Deliberately not here: whether a function exists and whether an address replies
(`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jinja2 import Environment, TemplateError, meta

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.config.reward import JudgeReward, MixedReward
from verl_ray.config.rules.rule import OverriddenKeys
from verl_ray.config.schema import Config
from verl_ray.config.suggest import closest, either
from verl_ray.config.vllm_limits import VLLM_LEAST_TEMPERATURE
from verl_ray.errors import Problem
from verl_ray.shell import table_override

if TYPE_CHECKING:  # it imports this module
    from verl_ray.config.tasks.rl import RLConfig

TEMPLATE_FIELDS = ("prompt", "response", "answer", "data_source", "extra")
"""Fields of a `rewards.request.ScoreRequest` that a judge's template may show."""


# --------------------------------------------------------------- functions and services


def rewards_have_a_function(config: Config, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each grader by functions that has none."""
    for section, grader in config.active_graders(learns=True).items():
        # None stands for a grader of another kind.
        if grader.named_functions == {}:
            rule = "no data source has a reward function"
            table = table_override(f"{section}.functions", {"default": "exact_match"})
            fix = f"Set {table}."
            yield Problem(f"{section}.functions", {}, rule, fix)


def graders_finish_within_the_stall_limit(
    config: Config, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each grader that may take longer than the run waits."""
    stall_s = config.run.stall_s

    for section, grader in config.active_graders(learns=True).items():
        deadline_s = grader.time_limit_s
        if deadline_s is not None and deadline_s > stall_s:
            rule = (
                f"run.stall_s={stall_s} ends the run before this ends a response's"
                " grading"
            )
            fix = f"Use at most {stall_s}, or raise run.stall_s."
            yield Problem(f"{section}.deadline_s", deadline_s, rule, fix)


def requests_end_before_their_batch(
    config: Config, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each service whose request may outlast its batch."""
    for section, grader in config.graders.items():
        service = grader.as_service
        if service is None:
            continue

        timeout_s = service.request_timeout_s
        deadline_s = service.deadline_s
        if timeout_s > deadline_s:
            rule = (
                f"{section}.deadline_s={deadline_s} bounds a batch with all its"
                " requests"
            )
            fix = f"Use at most {deadline_s}, or raise the deadline."
            yield Problem(f"{section}.request_timeout_s", timeout_s, rule, fix)


def normalised_scores_matter(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem if scores are normalised and the advantage undoes it.

    Some group baselines divide by the deviation of the group.
    """
    advantage = ADVANTAGES[config.algorithm.advantage]
    reward = config.graders.get("reward")
    if reward is None:
        return

    if reward.normalise != "none" and advantage.needs_positive_scores:
        rule = (
            f"algorithm.advantage={advantage.name} learns only from groups whose mean"
            " score is above 0, and normalised scores lie around 0"
        )
        fix = "Set it to none, or use another algorithm.advantage."
        yield Problem("reward.normalise", reward.normalise, rule, fix)

    if not advantage.divides_by_spread:
        return

    # Clipping depends on the scale, so that normalising changes something then.
    if reward.normalise != "none" and reward.clip is None:
        rule = (
            f"algorithm.advantage={advantage.name} compares within a group and divides"
            " by a deviation, which undoes this"
        )
        fix = "Set it to none, or give reward.clip as well."
        yield Problem("reward.normalise", reward.normalise, rule, fix)


# ----------------------------------------------------------------------------- mixtures


def mixed_rewards_have_weights(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem unless every component of a mixture has a name and a weight."""
    reward = config.reward.as_mixture
    if reward is None:
        return

    yield from _component_problems(reward)
    # Without components every weight would be one too many.
    if reward.components:
        yield from _weight_problems(reward)


def _component_problems(reward: MixedReward) -> Iterator[Problem]:
    if not reward.components:
        rule = "there is nothing to mix"
        fix = (
            "Set reward=function, or give components in a YAML file of your own"
            " (--config-dir)."
        )
        yield Problem("reward.components", {}, rule, fix)

    # A dot would split the key, and a blank the name of a metric.
    for name, component in sorted(reward.components.items()):
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            key = f"reward.components.{name}"
            rule = "the name of a component is part of keys and of metrics"
            yield Problem(key, component.kind, rule, "Use letters, digits and _.")


def _weight_problems(reward: MixedReward) -> Iterator[Problem]:
    names = reward.components.keys()

    for name in sorted(names - reward.weights.keys()):
        key = f"reward.weights.{name}"
        rule = f"the component {name} has no weight"
        yield Problem(key, None, rule, f"Set {key}=1.0.")

    for name in sorted(reward.weights.keys() - names):
        key = f"reward.weights.{name}"
        rule = f"there is no component {name}"
        near = closest(name, names)
        if near:
            fix = f"Did you mean {either(near)}?"
        else:
            fix = f"Leave it out; there are {either(sorted(names))}."
        yield Problem(key, reward.weights[name], rule, fix)

    for name, weight in sorted(reward.weights.items()):
        if weight == 0 and name in names:
            key = f"reward.weights.{name}"
            rule = "this component would be computed and then ignored"
            fix = "Give it a weight, or leave the component out."
            yield Problem(key, weight, rule, fix)


# ------------------------------------------------------------------------------- judges


def judge_settings_work(config: Config, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting with which a judge can give no score."""
    for section, judge in config.judges.items():
        yield from _judge_problems(section, judge)


def _judge_problems(section: str, judge: JudgeReward) -> Iterator[Problem]:
    if judge.lowest >= judge.highest:
        rule = f"it must be above {section}.lowest"
        fix = f"Set it above {judge.lowest}."
        yield Problem(f"{section}.highest", judge.highest, rule, fix)

    verdict_rule = verdict_problem(judge.verdict)
    if verdict_rule is not None:
        fix = r"Use one group around the number, e.g. 'score: *(\d+)'."
        yield Problem(f"{section}.verdict", judge.verdict, verdict_rule, fix)

    template_rule = template_problem(judge.template)
    if template_rule is not None:
        fix = (
            "Write {{ response }} where the response goes;"
            f" {either(TEMPLATE_FIELDS)} can be shown."
        )
        yield Problem(f"{section}.template", judge.template, template_rule, fix)

    if 0 < judge.temperature < VLLM_LEAST_TEMPERATURE:
        rule = f"vLLM samples from a temperature of {VLLM_LEAST_TEMPERATURE}"
        fix = f"Use at least {VLLM_LEAST_TEMPERATURE}, or 0 for greedy."
        yield Problem(f"{section}.temperature", judge.temperature, rule, fix)


def template_problem(template: str) -> str | None:
    """Return what is wrong with a judge's template; None if nothing is."""
    try:
        syntax_tree = Environment().parse(template)
        variables = meta.find_undeclared_variables(syntax_tree)
    except TemplateError as error:
        return f"this is no template ({error})"

    unknown = sorted(variables.difference(TEMPLATE_FIELDS))
    if unknown:
        name = unknown[0]
        near = closest(name, TEMPLATE_FIELDS)
        hint = f" (did you mean {either(near)}?)" if near else ""
        return f"there is no {name} to show{hint}"

    if "response" not in variables:
        return "the judge would not see the response"
    return None


def verdict_problem(pattern: str) -> str | None:
    """Return what is wrong with a judge's verdict pattern; None if nothing is."""
    try:
        verdict = re.compile(pattern)
    except re.error as error:
        return f"this is no regular expression ({error})"

    if verdict.groups != 1:
        return (
            f"it must have one group, which holds the score, and has {verdict.groups}"
        )
    # Such a pattern would give every response a score.
    if verdict.search(""):
        return "it finds a verdict in an empty response"
    return None
