"""Rules of rewards: functions, services, judges, mixtures.

Invariant: every response can get a score before the run gives up waiting for it. Deliberately not here: whether a
function exists and an address can be asked (`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jinja2 import Environment, TemplateError, meta

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.config.rules.rollout import VLLM_LEAST_TEMPERATURE
from verl_ray.config.rules.rule import Overridden
from verl_ray.config.schema import Config
from verl_ray.config.suggest import closest, either
from verl_ray.errors import Problem

if TYPE_CHECKING:  # which name these rules
    from verl_ray.config.tasks.rl import RLConfig

TEMPLATE_FIELDS = ("prompt", "response", "answer", "data_source", "extra")
"""What a judge's template may show: the fields of a `rewards.process.ScoreRequest`."""


def rewards_have_a_function(config: Config, _: Overridden) -> Iterator[Problem]:
    for key, one in config.graders_at_work(learns=True).items():
        if one.named_functions == {}:
            fix = f"Set {key}.functions={{default: exact_match}}."
            yield Problem(f"{key}.functions", {}, "no data source has a reward function", fix)


def graders_keep_the_deadline_of_calls(config: Config, _: Overridden) -> Iterator[Problem]:
    for key, one in config.graders_at_work(learns=True).items():
        deadline_s = one.slowest_s
        if deadline_s is not None and deadline_s > config.run.stall_s:
            rule = f"run.stall_s={config.run.stall_s} ends the run before this ends a response's grading"
            fix = f"Use at most {config.run.stall_s}, or raise run.stall_s."
            yield Problem(f"{key}.deadline_s", deadline_s, rule, fix)


def requests_end_before_their_batch(config: Config, _: Overridden) -> Iterator[Problem]:
    for section, grader in config.graders.items():
        service = grader.service
        if service is not None and service.request_timeout_s > service.deadline_s:
            rule = f"{section}.deadline_s={service.deadline_s} bounds a batch with all its requests"
            fix = f"Use at most {service.deadline_s}, or raise the deadline."
            yield Problem(f"{section}.request_timeout_s", service.request_timeout_s, rule, fix)


def normalised_scores_matter(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    """Some group baselines divide by a deviation of their own."""
    advantage = ADVANTAGES[config.algorithm.advantage]
    alone = config.graders.get("reward")
    if alone is None or not advantage.forgets_scale:
        return
    if alone.normalise != "none" and alone.clip is None:
        because = f"algorithm.advantage={advantage.name}"
        rule = f"{because} compares within a group and divides by its deviation, which undoes this"
        fix = "Set it to none, or give reward.clip as well."
        yield Problem("reward.normalise", alone.normalise, rule, fix)


def mixed_rewards_have_weights(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    reward = config.reward.mixed
    if reward is None:
        return
    if not reward.components:
        fix = "Set reward=function, or give components in a YAML file of your own (--config-dir)."
        yield Problem("reward.components", {}, "there is nothing to mix", fix)
    for name in sorted(reward.components):
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            rule = "the name of a component is part of keys and of metrics"
            yield Problem(f"reward.components.{name}", reward.components[name].kind, rule, "Use letters, digits and _.")
    for name in sorted(reward.components.keys() - reward.weights.keys()):
        rule = f"the component {name} has no weight"
        yield Problem(f"reward.weights.{name}", None, rule, f"Set reward.weights.{name}=1.0.")
    for name in sorted(reward.weights.keys() - reward.components.keys()):
        near = closest(name, reward.components)
        fix = (
            f"Did you mean {either(near)}?" if near else f"Leave it out; there are {either(sorted(reward.components))}."
        )
        yield Problem(f"reward.weights.{name}", reward.weights[name], f"there is no component {name}", fix)
    for name, weight in sorted(reward.weights.items()):
        if weight == 0 and name in reward.components:
            rule = "this component would be computed and then ignored"
            yield Problem(f"reward.weights.{name}", weight, rule, "Give it a weight, or leave the component out.")


def judges_can_be_asked(config: Config, _: Overridden) -> Iterator[Problem]:
    for section, judge in config.judges.items():
        if judge.lowest >= judge.highest:
            fix = f"Set it above {judge.lowest}."
            yield Problem(f"{section}.highest", judge.highest, f"it must be above {section}.lowest", fix)
        if (problem := verdict_problem(judge.verdict)) is not None:
            fix = r"Use one group around the number, e.g. 'score: *(\d+)'."
            yield Problem(f"{section}.verdict", judge.verdict, problem, fix)
        if (problem := template_problem(judge.template)) is not None:
            fix = f"Write {{{{ response }}}} where the response goes; {either(TEMPLATE_FIELDS)} can be shown."
            yield Problem(f"{section}.template", judge.template, problem, fix)
        if 0 < judge.temperature < VLLM_LEAST_TEMPERATURE:
            rule = f"vLLM samples from a temperature of {VLLM_LEAST_TEMPERATURE}"
            fix = f"Use at least {VLLM_LEAST_TEMPERATURE}, or 0 for greedy."
            yield Problem(f"{section}.temperature", judge.temperature, rule, fix)


def template_problem(template: str) -> str | None:
    """What is wrong with a judge's template, if anything."""
    try:
        shown = meta.find_undeclared_variables(Environment().parse(template))
    except TemplateError as error:
        return f"this is no template ({error})"
    if unknown := sorted(shown.difference(TEMPLATE_FIELDS)):
        near = closest(unknown[0], TEMPLATE_FIELDS)
        return f"there is no {unknown[0]} to show" + (f" (did you mean {either(near)}?)" if near else "")
    return None if "response" in shown else "the judge would not see the response"


def verdict_problem(pattern: str) -> str | None:
    """What is wrong with a judge's verdict pattern, if anything."""
    try:
        verdict = re.compile(pattern)
    except re.error as error:
        return f"this is no regular expression ({error})"
    if verdict.groups != 1:
        return f"it must have one group, which holds the score, and has {verdict.groups}"
    return "it finds a verdict in an empty answer" if verdict.search("") else None
