"""Where scores come from: functions, a model, a judge, a service, or several of them.

Invariant: each source is a class of its own with a `kind`, which chooses it. Deliberately not here: learning a reward
model (`tasks/reward_model.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.config.roles import ModelConfig, ModelRole
from verl_ray.config.rollout import RolloutEngineConfig
from verl_ray.config.section import Fraction, Positive, PositiveFloat, Section, Temperature

HELD_OUT = "evaluation"
"""The name of the grader of held-out problems, where they have one of their own."""


class Grader(Section):
    """What every source of scores has."""

    normalise: Literal["none", "batch", "running"]
    """Shift and scale scores to mean 0 and standard deviation 1: over each step, over all steps so far, or not."""
    clip: PositiveFloat | None
    """Hold scores, once normalised, within [-clip, clip]; null = no clipping."""
    max_failed_fraction: Fraction
    """Stop the run when more than this fraction of a step's scores failed."""

    def by_key(self, section: str) -> dict[str, SingleReward]:
        """Every source of scores under the key of its section, `section` being that of the reward as a whole."""
        return {section: self}  # type: ignore[dict-item]  # every class that is made is one of the union

    @property
    def mixed(self) -> MixedReward | None:
        """The reward itself where it is a sum of several."""
        return None

    @property
    def named_functions(self) -> dict[str, str] | None:
        """Functions by data source, where they score."""
        return None

    @property
    def service(self) -> HttpReward | None:
        """The grader itself where it is a service that is asked."""
        return None

    @property
    def slowest_s(self) -> float | None:
        """How long one answer may take, where there is such a limit."""
        return None

    @property
    def cpu_ranks(self) -> int | None:
        """Processes that need no device; None for what computes with a model."""
        return None

    @property
    def asks(self) -> str:
        """The functions or the service that these ask, in words."""
        return ""

    @property
    def served(self) -> JudgeReward | None:
        """The grader itself where a language model of its own is asked."""
        return None

    @property
    def model_role(self) -> ModelRole | None:
        """The grader itself where it is a model on a training backend."""
        return None

    @property
    def processes(self) -> int:
        """How many it has of its own."""
        return self.cpu_ranks or 0

    @property
    def parallel_devices(self) -> int:
        """Devices of one of them, where there are any."""
        return 0


class FunctionReward(Grader):
    """Scores by Python functions in killable processes."""

    kind: Literal["function"]
    num_ranks: Positive
    """Ray actors that score; each is CPU only."""
    processes_per_rank: Positive
    """Killable processes per actor: responses scored at the same time."""
    deadline_s: PositiveFloat
    """How long one response may take to score before its process is killed and the failure counted."""
    functions: Annotated[dict[str, str], Field(examples=["{default: exact_match}"])]
    """Data source -> exact_match, gsm8k, or path/to/file.py:function; `default` serves the other data sources."""

    @property
    def named_functions(self) -> dict[str, str] | None:
        return self.functions

    @property
    def asks(self) -> str:
        return ", ".join(f"{source}: {spec}" for source, spec in self.functions.items())

    @property
    def slowest_s(self) -> float | None:
        return self.deadline_s

    @property
    def cpu_ranks(self) -> int | None:
        return self.num_ranks


class ModelReward(Grader, ModelRole):
    """Scores by a sequence-classification model with one label, on a backend."""

    kind: Literal["model"]

    @property
    def model_role(self) -> ModelRole | None:
        return self

    @property
    def grades(self) -> bool:
        return True


class JudgeReward(Grader):
    """Scores by a language model that is asked for a verdict."""

    kind: Literal["judge"]
    model: ModelConfig
    engine: RolloutEngineConfig
    template: str
    """What the judge is asked: a Jinja template with prompt, response, answer, data_source and extra."""
    verdict: str
    """Regular expression whose last match in the judge's response holds the score in its one group."""
    lowest: float
    """The least score that the judge may give; what lies outside is no verdict."""
    highest: float
    """The greatest score that it may give."""
    max_prompt_tokens: Positive
    """The longest question to the judge; a response that makes it longer has no score."""
    max_response_tokens: Positive
    temperature: Temperature
    """0 = greedy."""

    @property
    def served(self) -> JudgeReward | None:
        return self

    @property
    def processes(self) -> int:
        return self.engine.num_replicas

    @property
    def parallel_devices(self) -> int:
        return self.engine.tensor_parallel


class HttpReward(Grader):
    """Scores by a service: JSON over HTTP."""

    kind: Literal["http"]
    num_ranks: Positive
    """Ray actors that ask; each is CPU only and has limits of its own."""
    url: str
    """Where items are posted."""
    token_env: str | None
    """Environment variable of the workers that holds a bearer token; null = none is sent."""
    batch_size: Positive
    """Responses per request."""
    concurrency: Positive
    """Requests in flight at the same time."""
    requests_per_s: PositiveFloat | None
    """Rate limit; null = none."""
    request_timeout_s: PositiveFloat
    """How long the service may take for one request before it counts as failed."""
    deadline_s: PositiveFloat
    """How long one batch may take, all its attempts and waits included."""
    max_attempts: Positive
    """Requests per batch, the first included."""
    backoff_s: PositiveFloat
    """Wait before the second attempt; it doubles with each further one, with jitter."""
    circuit_failures: Positive
    """Batches that fail in a row before the circuit opens: nothing is sent any more and every score fails at once."""
    circuit_reset_s: PositiveFloat
    """How long the circuit stays open before one batch may try again."""

    @property
    def service(self) -> HttpReward | None:
        return self

    @property
    def asks(self) -> str:
        return self.url

    @property
    def slowest_s(self) -> float | None:
        return self.deadline_s

    @property
    def cpu_ranks(self) -> int | None:
        return self.num_ranks


SingleReward = Annotated[FunctionReward | ModelReward | JudgeReward | HttpReward, Field(discriminator="kind")]


class MixedReward(Section):
    """A weighted sum of several scores. A response that one of them cannot score has none."""

    kind: Literal["mixed"]
    components: dict[str, SingleReward]
    """Name -> where scores come from; the name is part of the metrics."""
    weights: Annotated[dict[str, float], Field(examples=["{function: 1.0, model: 0.5}"])]
    """Name -> factor of its scores, once normalised and clipped."""

    def by_key(self, section: str) -> dict[str, SingleReward]:
        """As of the others."""
        return {f"{section}.components.{name}": one for name, one in self.components.items()}

    @property
    def mixed(self) -> MixedReward | None:
        """As of the others."""
        return self


Reward = Annotated[FunctionReward | ModelReward | JudgeReward | HttpReward | MixedReward, Field(discriminator="kind")]
