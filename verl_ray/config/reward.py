"""Sources of scores: functions, a model, a judge, a service, or a mixture of them.

Invariant: each source is a class of its own with a `kind`, which chooses it. Every
response can get a score before the run gives up waiting for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from jinja2 import Environment, TemplateError, meta
from pydantic import Field

from verl_ray.config.paths import RewardFunction
from verl_ray.config.roles import ModelConfig, ModelRole
from verl_ray.config.rollout import VLLM_LEAST_TEMPERATURE, RolloutEngineConfig
from verl_ray.errors import Problem
from verl_ray.settings.section import (
    Fraction,
    NonNegative,
    OverriddenKeys,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
    resolved,
)
from verl_ray.shell import table_override
from verl_ray.suggest import closest, either

TEMPLATE_FIELDS = (
    "prompt",
    "response",
    "answer",
    "data_source",
    "extra",
    "episode_score",
    "episode_end",
    "episode_messages",
    "episode_conversations",
    "episode_output",
)
"""Fields of a `rewards.request.ScoreRequest` that a judge's template may show."""

HELD_OUT_GRADER = "evaluation"
"""Name of the grader of held-out problems, where these have a grader of their own."""


class GraderConfig(Section):
    """The settings that every source of scores has."""

    normalise: Literal["none", "batch", "running"]
    """Shift and scale scores to mean 0 and standard deviation 1: not at all, over each
    step, or over all steps so far."""
    clip: PositiveFloat | None
    """Hold scores, once normalised, within [-clip, clip]; null = no clipping."""
    max_failed_fraction: Fraction
    """Stop the run when more than this fraction of a step's scores fail, as soon as so
    many have."""

    @property
    def named_functions(self) -> dict[str, str] | None:
        """Functions by data source, if functions score; else None."""
        return None

    @property
    def time_limit_s(self) -> float | None:
        """Longest time of one score in seconds; None if there is no limit."""
        return None

    @property
    def cpu_ranks(self) -> int | None:
        """Number of processes that need no device; None if a model computes."""
        return None

    @property
    def source_in_words(self) -> str:
        """The functions or the service that score, in words."""
        return ""

    @property
    def num_processes(self) -> int:
        """Number of processes that the grader has for itself."""
        return self.cpu_ranks or 0

    @property
    def devices_per_process(self) -> int:
        """Number of devices of one process, on a machine that has devices."""
        return 0


class FunctionReward(GraderConfig):
    """Scores by Python functions in killable processes."""

    kind: Literal["function"]
    num_ranks: Positive
    """Ray actors that score; each is CPU only."""
    processes_per_rank: Positive
    """Killable processes per actor: responses scored at the same time."""
    deadline_s: PositiveFloat
    """Longest time to score one response, after which its process is killed and the
    failure counted; a batched function has as much for each response of the group."""
    functions: Annotated[
        dict[str, RewardFunction], Field(examples=["{default: exact_match}"])
    ]
    """Data source -> a built-in function (by_data_source, exact_match, gsm8k,
    gsm8k_strict, math, multiple_choice, format, json_schema, f1, rouge, bleu,
    environment: what the environment of an episode paid),
    path/to/file.py:function or package.module:function, which may be a class, too;
    `default` serves the other data sources. A table gives a function arguments:
    {function: format, tags: [think, answer]}. A function names what it gets: response,
    answer, prompt, data_source, extra, num_tokens, finish_reason, step. Those of verl
    (solution_str) and TRL (completions) are called as there. It returns a number, None,
    or a dict with `score` and entries that become metrics."""

    @property
    def named_functions(self) -> dict[str, str] | None:
        return self.functions

    @property
    def source_in_words(self) -> str:
        return ", ".join(f"{source}: {spec}" for source, spec in self.functions.items())

    @property
    def time_limit_s(self) -> float | None:
        return self.deadline_s

    @property
    def cpu_ranks(self) -> int | None:
        return self.num_ranks


class ModelReward(GraderConfig, ModelRole):
    """Scores by a sequence-classification model with one label, on a backend."""

    kind: Literal["model"]

    @property
    def scores_rollouts(self) -> bool:
        return True


class JudgeReward(GraderConfig):
    """Scores by a language model that gives a verdict on each response."""

    kind: Literal["judge"]
    model: ModelConfig
    engine: RolloutEngineConfig
    template: str
    """The judge's prompt: a Jinja template with prompt, response, answer, data_source
    and extra."""
    verdict: str
    """Regular expression whose last match in the judge's response holds the score in
    its only group."""
    lowest: float
    """The lowest score that the judge may give; outside of the range is no verdict."""
    highest: float
    """The highest score that the judge may give."""
    max_prompt_tokens: Positive
    """The longest prompt of the judge; a response that makes it longer has no score."""
    max_response_tokens: Positive
    """The longest response of the judge, in tokens."""
    temperature: Temperature
    """Temperature of the judge's sampling; 0 = greedy."""

    @property
    def num_processes(self) -> int:
        return resolved(self.engine.num_replicas)

    @property
    def devices_per_process(self) -> int:
        return self.engine.ranks_per_replica


class HttpReward(GraderConfig):
    """Scores by a service: JSON over HTTP."""

    kind: Literal["http"]
    num_ranks: Positive
    """Ray actors that send requests; each is CPU only and has limits of its own."""
    url: str
    """Address that requests are posted to."""
    token_env: str | None
    """Environment variable of the workers that holds a bearer token; null = none is
    sent."""
    batch_size: Positive
    """Responses per request."""
    concurrency: Positive
    """Requests in flight at the same time."""
    requests_per_s: PositiveFloat | None
    """Rate limit; null = none."""
    request_timeout_s: PositiveFloat
    """Longest time of one request, after which it counts as failed."""
    deadline_s: PositiveFloat
    """Longest time of one batch, all its attempts and waits included."""
    max_attempts: Positive
    """Requests per batch, the first included."""
    backoff_s: PositiveFloat
    """Wait before the second attempt; it doubles with each further one, with jitter."""
    max_outage_s: PositiveFloat
    """Longest time to ask a service again that refuses, answers 5xx or times out as a
    whole; then the run ends. A batch that fails alone has failed scores."""

    @property
    def source_in_words(self) -> str:
        return self.url

    @property
    def time_limit_s(self) -> float | None:
        return self.deadline_s

    @property
    def cpu_ranks(self) -> int | None:
        return self.num_ranks


SingleReward = Annotated[
    FunctionReward | ModelReward | JudgeReward | HttpReward, Field(discriminator="kind")
]
"""A source of scores that is no mixture."""


class MixedReward(Section):
    """A weighted sum of several scores.

    A component that returns None leaves a response to the others. One that a component
    fails, or that all of them leave, has no score.
    """

    kind: Literal["mixed"]
    components: dict[str, SingleReward]
    """Name -> where scores come from; the name is part of the metrics."""
    weights: Annotated[
        dict[str, float], Field(examples=["{function: 1.0, model: 0.5}"])
    ]
    """Name -> factor of its scores, once normalised and clipped."""


Reward = Annotated[
    FunctionReward | ModelReward | JudgeReward | HttpReward | MixedReward,
    Field(discriminator="kind"),
]
"""A source of scores of any kind."""


def sources_by_key(reward: Reward, section: str) -> dict[str, SingleReward]:
    """Return every source of scores under the key of its section.

    Args:
        reward: A source, or a mixture of several.
        section: The key of the reward as a whole.
    """
    if not isinstance(reward, MixedReward):
        return {section: reward}
    return {
        f"{section}.components.{name}": component
        for name, component in reward.components.items()
    }


class EvaluationConfig(Section):
    """The evaluation on held-out problems."""

    num_prompts: Positive | None
    """The first N held-out problems; null = all."""
    group_size: Positive
    """Responses per problem; the metric is acc/mean@N or reward/mean@N."""
    temperature: Temperature
    """Temperature of the sampling; 0 = greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Sample from the likeliest tokens of this probability together; 1 = from all."""
    top_k: Annotated[int, Field(ge=-1)]
    """Sample from this many likeliest tokens; -1 or 0 = from all."""
    samples: NonNegative
    """First responses of each evaluation in W&B's table and the output of evaluate;
    evaluations/ has all of them."""
    functions: (
        Annotated[dict[str, RewardFunction], Field(examples=["{default: exact_match}"])]
        | None
    )
    """Grade held-out responses by these functions instead of the reward; null = by the
    reward."""
    deadline_s: PositiveFloat
    """Longest time to grade one held-out response by evaluation.functions."""

    @property
    def grader(self) -> FunctionReward | None:
        """The grader of held-out problems; None if the reward grades them."""
        if self.functions is None:
            return None

        # Only the functions and their deadline are settings.
        return FunctionReward(
            kind="function",
            num_ranks=1,
            processes_per_rank=1,
            deadline_s=self.deadline_s,
            functions=self.functions,
            normalise="none",
            clip=None,
            max_failed_fraction=1.0,
        )


# -------------------------------------------------------------------------------- rules


def rewards_have_a_function(graders: Mapping[str, SingleReward]) -> Iterator[Problem]:
    """Yield a problem for each grader by functions that has none."""
    for section, grader in graders.items():
        # None stands for a grader of another kind.
        if grader.named_functions == {}:
            rule = "no data source has a reward function"
            table = table_override(f"{section}.functions", {"default": "exact_match"})
            fix = f"Set {table}."
            yield Problem(f"{section}.functions", {}, rule, fix)


def graders_finish_within_the_stall_limit(
    graders: Mapping[str, SingleReward], stall_s: float
) -> Iterator[Problem]:
    """Yield a problem for each grader that may take longer than the run waits."""
    for section, grader in graders.items():
        deadline_s = grader.time_limit_s
        if deadline_s is not None and deadline_s > stall_s:
            rule = (
                f"run.stall_s={stall_s} ends the run before this ends a response's"
                " grading"
            )
            fix = f"Use at most {stall_s}, or raise run.stall_s."
            yield Problem(f"{section}.deadline_s", deadline_s, rule, fix)


def judge_settings_work(judges: Mapping[str, JudgeReward]) -> Iterator[Problem]:
    """Yield a problem for each setting with which a judge can give no score."""
    for section, judge in judges.items():
        yield from _judge_problems(section, judge)


def _judge_problems(section: str, judge: JudgeReward) -> Iterator[Problem]:
    if judge.lowest >= judge.highest:
        rule = f"it must be above {section}.lowest"
        fix = f"Set it above {judge.lowest}."
        yield Problem(f"{section}.highest", judge.highest, rule, fix)

    verdict_rule = _verdict_problem(judge.verdict)
    if verdict_rule is not None:
        fix = r"Use one group around the number, e.g. 'score: *(\d+)'."
        yield Problem(f"{section}.verdict", judge.verdict, verdict_rule, fix)

    template_rule = _template_problem(judge.template)
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


def _template_problem(template: str) -> str | None:
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

    if variables.isdisjoint({"response", "episode_messages", "episode_conversations"}):
        return "the judge would not see the response"
    return None


def _verdict_problem(pattern: str) -> str | None:
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


def requests_end_before_their_batch(
    graders: Mapping[str, SingleReward],
) -> Iterator[Problem]:
    """Yield a problem for each service whose request may outlast its batch."""
    for section, grader in graders.items():
        if not isinstance(grader, HttpReward):
            continue

        timeout_s = grader.request_timeout_s
        deadline_s = grader.deadline_s
        if timeout_s > deadline_s:
            rule = (
                f"{section}.deadline_s={deadline_s} bounds a batch with all its"
                " requests"
            )
            fix = f"Use at most {deadline_s}, or raise the deadline."
            yield Problem(f"{section}.request_timeout_s", timeout_s, rule, fix)


def mixed_rewards_have_weights(reward: Reward) -> Iterator[Problem]:
    """Yield a problem unless every component of a mixture has a name and a weight."""
    if not isinstance(reward, MixedReward):
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


def greedy_evaluation_needs_one_response(
    evaluation: EvaluationConfig,
) -> Iterator[Problem]:
    """Yield a problem if greedy decoding would generate a response several times."""
    if evaluation.temperature == 0 and evaluation.group_size > 1:
        rule = "with evaluation.temperature=0 all responses to a problem are the same"
        fix = "Use 1, or a temperature above 0."
        yield Problem("evaluation.group_size", evaluation.group_size, rule, fix)


def greedy_evaluation_truncates_nothing(
    evaluation: EvaluationConfig,
) -> Iterator[Problem]:
    """Yield a problem for each truncation of a distribution that is not sampled."""
    if evaluation.temperature:
        return
    rule = "with evaluation.temperature=0 the likeliest token is taken"
    for key, value, all_tokens in (
        ("evaluation.top_p", evaluation.top_p, (1.0,)),
        ("evaluation.top_k", evaluation.top_k, (-1, 0)),
    ):
        if value not in all_tokens:
            fix = f"Use {all_tokens[0]}, or a temperature above 0."
            yield Problem(key, value, rule, fix)


def held_out_deadline_is_used(
    evaluation: EvaluationConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if the deadline of a grader is set that does not exist."""
    if evaluation.functions is None:
        keys = overridden.under("evaluation.deadline_s")
        reason = (
            "evaluation.functions=null leaves grading to the reward, with its deadline"
        )
        yield from overridden.ignored(keys, reason)
