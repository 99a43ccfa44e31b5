"""Sources of scores: functions, a model, a judge, a service, or a mixture of them.

Invariant: each source is a class of its own with a `kind`, which chooses it. Code that
needs one kind of source narrows to it through the `as_...` properties. Deliberately not
here: learning a reward model (`tasks/reward_model.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.config.paths import RewardFunction
from verl_ray.config.roles import ModelConfig, ModelRole
from verl_ray.config.rollout import RolloutEngineConfig
from verl_ray.config.section import (
    Fraction,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
    resolved,
)

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
    """Stop the run when more than this fraction of a step's scores fail, as soon as the
    scores so far show it."""

    def sources_by_key(self, section: str) -> dict[str, SingleReward]:
        """Return every source of scores under the key of its section.

        Args:
            section: the key of the reward as a whole.
        """
        # Every class over this one that has instances is a member of the union.
        return {section: self}  # type: ignore[dict-item]

    @property
    def as_mixture(self) -> MixedReward | None:
        """The reward itself if it is a sum of several; else None."""
        return None

    @property
    def as_service(self) -> HttpReward | None:
        """The grader itself if it is a service; else None."""
        return None

    @property
    def as_judge(self) -> JudgeReward | None:
        """The grader itself if it is a language model of its own; else None."""
        return None

    @property
    def as_model_role(self) -> ModelRole | None:
        """The grader itself if it is a model on a training backend; else None."""
        return None

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
    gsm8k_strict, math, multiple_choice, format, json_schema, f1, rouge, bleu),
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
    def as_model_role(self) -> ModelRole | None:
        return self

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
    def as_judge(self) -> JudgeReward | None:
        return self

    @property
    def num_processes(self) -> int:
        return resolved(self.engine.num_replicas)

    @property
    def devices_per_process(self) -> int:
        return self.engine.tensor_parallel


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
    circuit_failures: Positive
    """Batches that fail in a row before the circuit opens: no request is sent any more
    and every score fails at once."""
    circuit_reset_s: PositiveFloat
    """Time that the circuit stays open before one batch may try again."""

    @property
    def as_service(self) -> HttpReward | None:
        return self

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

    A response that one of the components cannot score has no score.
    """

    kind: Literal["mixed"]
    components: dict[str, SingleReward]
    """Name -> where scores come from; the name is part of the metrics."""
    weights: Annotated[
        dict[str, float], Field(examples=["{function: 1.0, model: 0.5}"])
    ]
    """Name -> factor of its scores, once normalised and clipped."""

    def sources_by_key(self, section: str) -> dict[str, SingleReward]:
        """Return the components under the keys of their sections."""
        return {
            f"{section}.components.{name}": component
            for name, component in self.components.items()
        }

    @property
    def as_mixture(self) -> MixedReward | None:
        """The reward itself, as a mixture."""
        return self


Reward = Annotated[
    FunctionReward | ModelReward | JudgeReward | HttpReward | MixedReward,
    Field(discriminator="kind"),
]
"""A source of scores of any kind."""
