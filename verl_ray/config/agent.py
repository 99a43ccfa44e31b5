"""Episodes: environments, tools and several turns.

Invariant: without an environment nothing here has an effect, and what is set is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.paths import EnvironmentSpec
from verl_ray.config.reward import ModelReward, SingleReward
from verl_ray.errors import Problem
from verl_ray.settings.episode_ends import (
    FAULTS,
    MOST_TURNS,
    TREATMENTS,
    End,
    Treatment,
)
from verl_ray.settings.section import (
    Auto,
    NonNegative,
    OverriddenKeys,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
)
from verl_ray.suggest import did_you_mean

ENVIRONMENT = "environment"
"""Name of the reward function whose score is that of the episode."""


class ModelService(Section):
    """A frozen model that environments talk to, behind a server with OpenAI's API.

    It is an entry of a table, so what is left out has its default here.
    """

    url: str
    """Address of the API, such as http://host:8000/v1, as the nodes of the rollout
    replicas reach it."""
    model: str | None = None
    """Name of the model; null = the only one that the server has."""
    token_env: str | None = None
    """Environment variable of the workers that holds a bearer token; null = none is
    sent."""
    temperature: Temperature = 0.0
    """Temperature of its sampling; 0 = greedy."""
    timeout_s: PositiveFloat = 20.0
    """Longest time of one answer. A request that failed alone is repeated once."""
    max_outage_s: PositiveFloat = 30.0
    """Longest time to ask a server again that refuses, answers 5xx or times out as a
    whole; then the call fails, and with it its episode."""
    concurrency: Positive = 32
    """Requests in flight at the same time, of each process of episodes."""


class AgentConfig(Section):
    """Environments, and the limits of an episode in one."""

    environments: Annotated[
        dict[str, EnvironmentSpec], Field(examples=["{default: my_env.py:Game}"])
    ]
    """Data source -> an environment: path/to/file.py:NAME or package.module:NAME, of a
    class, a coroutine function run(task, policy), or tools; `default` serves the other
    data sources. A record may name an entry itself, in its field `environment`. One
    that has none gets a single response. A table gives options: {function:
    my_env.py:Game, size: 4}. A program of its own is {command: python my_agent.py,
    reward: post}. {}: every rollout is a single response."""
    models: Annotated[
        dict[str, ModelService], Field(examples=["{user: {url: http://host:8000/v1}}"])
    ]
    """Name -> a frozen model that environments talk to:
    verl_ray.agents.models.model(NAME). A table of url, model, token_env, temperature,
    timeout_s, max_outage_s and concurrency."""
    tool_parser: str | None
    """Name of vLLM's parser of the model's tool calls, such as hermes; null = none are
    parsed."""
    reasoning_parser: Auto | str | None
    """Name of vLLM's parser of the model's thoughts, such as qwen3; null = thoughts are
    text, and a call in them is a call. auto: that of the marks which the chat template
    writes, or else of <think> and </think>."""
    max_turns: Annotated[int, Field(ge=1, le=MOST_TURNS)]
    """Turns of the policy in an episode."""
    max_tokens: Positive | None
    """Sampled tokens of an episode; null = no limit. A row has at most
    rollout.max_response_tokens more tokens than the first prompt of its episode, what
    the environment says included."""
    max_turn_tokens: Positive | None
    """Sampled tokens of one turn; null = what is left of its row."""
    max_result_tokens: Positive | None
    """Tokens of a tool's result that the policy reads; the rest of a longer one is left
    out, and its message says so. null = half of rollout.max_response_tokens."""
    max_tool_calls: Positive
    """Tool calls of the policy in an episode."""
    model_timeout_s: PositiveFloat
    """Longest time of one turn of the model."""
    tool_timeout_s: PositiveFloat
    """Longest time of one call of a tool or an environment."""
    turn_timeout_s: PositiveFloat
    """Longest time of a turn of the model with what the environment makes of it, and
    for which an agent of a user's own may ask nothing."""
    episode_timeout_s: PositiveFloat
    """Longest time of an episode."""
    processes_per_replica: Positive
    """Processes that run episodes beside each rollout engine."""
    episodes_per_process: Positive
    """Episodes that a process runs at a time."""
    process_memory_gib: PositiveFloat | None
    """Resident memory of a process of episodes with all that it started, in GiB, above
    which it gets no further episodes and is replaced once its open ones have ended;
    null = no limit."""
    max_retries: NonNegative
    """How often an episode that ended by a fault, a timeout or a failed environment, is
    run again from the beginning, with the same seeds: after a second, then two, then
    four, and so on up to 30."""
    ends: Annotated[dict[str, Treatment], Field(examples=["{max_turns: mask}"])]
    """End of an episode -> train, mask (its reward counts, its tokens are not learned
    from) or drop (it is no member of its group), where that differs from the usual."""

    @property
    def is_used(self) -> bool:
        """Whether rollouts are episodes."""
        return bool(self.environments)

    @property
    def treatments(self) -> Mapping[End, Treatment]:
        """The treatment of an episode, by its end."""
        changes = {End(end): each for end, each in self.ends.items()}
        return {**TREATMENTS, **changes}

    @property
    def retried_ends(self) -> frozenset[End]:
        """The faults after which an episode is run again, if it may be.

        One that counts in its group all the same has told what it can.
        """
        treatments = self.treatments
        return frozenset(end for end in FAULTS if treatments[end] is Treatment.DROP)


# -------------------------------------------------------------------------------- rules


def agent_problems(
    agent: AgentConfig,
    algorithm: AlgorithmConfig,
    graders: Mapping[str, SingleReward],
    max_response_tokens: int,
    overridden: OverriddenKeys,
) -> Iterator[Problem]:
    """Yield the problems of episodes, and of what is set for them without any."""
    yield from agent_settings_work(agent, overridden)
    if agent.is_used:
        yield from agent_limits_work(agent, max_response_tokens, overridden)
        yield from completed_episodes_are_members(agent)
    yield from episodes_are_not_greedy(agent, algorithm)
    yield from overlong_episodes_have_a_limit(agent, algorithm)
    yield from episodes_have_scores(agent, graders)


def agent_settings_work(
    agent: AgentConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that has no effect, or cannot have one."""
    names = [end.value for end in End]
    for end in agent.ends:
        if end not in names:
            fix = did_you_mean(end, names, "end")
            yield Problem("agent.ends", end, "no episode ends so", fix)

    if agent.is_used:
        return
    keys = [
        key
        for key in overridden.under("agent")
        if "environments" not in key and not _is_refused_model(key, agent)
    ]
    reason = "agent.environments is {}, so every rollout is a single response"
    yield from overridden.ignored(
        keys, reason, "Set agent.environments.default=my_env.py:NAME, or leave it out."
    )


def _is_refused_model(key: str, agent: AgentConfig) -> bool:
    """Return whether a key is of a model that is not there, since it was refused."""
    return (
        key.startswith("agent.models.")
        and key.split(".", maxsplit=3)[2] not in agent.models
    )


def agent_limits_work(
    agent: AgentConfig, max_response_tokens: int, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each limit that another limit always precedes."""
    row = "rollout.max_response_tokens", max_response_tokens
    episode = "agent.max_tokens", agent.max_tokens
    seconds = "agent.episode_timeout_s", agent.episode_timeout_s
    limits = [
        ("agent.max_turn_tokens", agent.max_turn_tokens, row),
        ("agent.max_turn_tokens", agent.max_turn_tokens, episode),
        ("agent.max_result_tokens", agent.max_result_tokens, row),
        ("agent.model_timeout_s", agent.model_timeout_s, seconds),
        ("agent.turn_timeout_s", agent.turn_timeout_s, seconds),
    ]
    for key, limit, (other_key, other) in limits:
        if limit is not None and other is not None and limit > other:
            keys = [key] if key in overridden.keys else []
            reason = f"{other_key}={other} is reached before"
            yield from overridden.ignored(keys, reason, "Lower it, or leave it out.")


def completed_episodes_are_members(agent: AgentConfig) -> Iterator[Problem]:
    """Yield a problem if nothing is learned from episodes that have no fault at all."""
    if agent.ends.get(End.COMPLETED) is Treatment.DROP:
        rule = "what is dropped says nothing of the policy, and such an episode does"
        fix = "Use mask for one whose tokens are not learned from, or leave it out."
        yield Problem("agent.ends", f"{End.COMPLETED}: {Treatment.DROP}", rule, fix)


def episodes_are_not_greedy(
    agent: AgentConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """Yield a problem if the baseline is a greedy response, which is no episode."""
    if agent.is_used and ADVANTAGES[algorithm.advantage].reads_greedy:
        rule = "its greedy response is a single one, and rollouts are episodes"
        yield Problem("algorithm.advantage", algorithm.advantage, rule, "Use rloo.")


def overlong_episodes_have_a_limit(
    agent: AgentConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """Yield a problem if no limit says which episodes are nearly too long."""
    if agent.is_used and algorithm.overlong_share and agent.max_tokens is None:
        rule = "algorithm.overlong_share is the last share of what an episode may have"
        fix = "Set it to a number of tokens, or set algorithm.overlong_share=null."
        yield Problem("agent.max_tokens", None, rule, fix)


def episodes_have_scores(
    agent: AgentConfig, graders: Mapping[str, SingleReward]
) -> Iterator[Problem]:
    """Yield a problem for each grader that cannot score episodes as they are."""
    for key, grader in graders.items():
        specs = grader.named_functions or {}
        uses_episodes = {
            source for source, spec in specs.items() if spec == ENVIRONMENT
        }
        if uses_episodes and not agent.is_used:
            rule = "there are no episodes, whose scores it would be"
            fix = "Set agent.environments.default=my_env.py:NAME."
            source = min(uses_episodes)
            yield Problem(f"{key}.functions.{source}", ENVIRONMENT, rule, fix)
        if agent.is_used and isinstance(grader, ModelReward):
            rule = "it scores rows, and an episode may have several"
            fix = "Use reward=function, reward=judge or a service."
            yield Problem(f"{key}.kind", grader.kind, rule, fix)
