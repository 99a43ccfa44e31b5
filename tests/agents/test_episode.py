"""Episodes: each end by its cause, limits, seeds, and `close` once, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.agents.templates import PRESERVING, tokenizer_with
from verl_ray.agents.contract import (
    Action,
    End,
    Environment,
    Episode,
    EpisodeEnded,
    EpisodeTask,
    Message,
    Observation,
    Policy,
    Sampled,
    Step,
    ToolCall,
    message_of,
)
from verl_ray.agents.deadlines import (
    Clock,
)
from verl_ray.agents.episode import (
    run_episode,
)
from verl_ray.agents.policy import (
    EpisodePolicy,
    Limits,
    turn_seed,
)
from verl_ray.agents.scripted import ScriptedSampler
from verl_ray.agents.template import Renderer
from verl_ray.agents.transcript import SampledTurn, Transcript
from verl_ray.columns.batch import Ragged
from verl_ray.data.encoding import SpelledTokens
from verl_ray.errors import DataError

TOKENIZER = tokenizer_with(PRESERVING)
RENDERER = Renderer(TOKENIZER)
TASK = EpisodeTask([{"role": "user", "content": "0?"}], answer="three")
WIDE = Limits(max_turns=10, max_tokens=1000, context_tokens=1000, close_s=0.2)
SHORT_S = 0.1
FOREVER = 1000.0


def limits(**changes: Any) -> Limits:
    return Limits(**{**vars(WIDE), **changes})


class Questions:
    """An environment that asks three questions, and pays 0.5 for each answer."""

    def __init__(self, **hooks: Callable[[], Awaitable[Any]]) -> None:
        """Take coroutine functions that replace what a method does."""
        self.calls: list[str] = []
        self.actions: list[Action] = []
        self._hooks = hooks

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        self.calls.append(f"reset {seed}")
        if "reset" in self._hooks:
            return await self._hooks["reset"]()
        return Observation(task.messages)

    async def step(self, action: Action) -> Step:
        self.calls.append("step")
        self.actions.append(action)
        if "step" in self._hooks:
            return await self._hooks["step"]()
        number = len(self.actions)
        if number == 3:
            return Step(reward=0.5, done=True)
        return Step([{"role": "user", "content": f"{number}?"}], reward=0.5)

    async def close(self) -> None:
        self.calls.append("close")
        if "close" in self._hooks:
            await self._hooks["close"]()


def play(
    environment: Any,
    bounds: Limits = WIDE,
    texts: tuple[str, ...] = ("one", "two", "three"),
    **options: Any,
) -> tuple[Episode, ScriptedSampler]:
    sampler = ScriptedSampler(TOKENIZER, texts, **options)
    make = (lambda: environment) if isinstance(environment, Questions) else environment
    episode = asyncio.run(run_episode(make, TASK, 7, sampler, RENDERER, bounds))
    return episode, sampler


def test_the_template_has_what_its_record_gives() -> None:
    """In all turns of its episode, and before what the run gives."""
    tokenizer = tokenizer_with(PRESERVING + "{{ '<think>' if thinks }}")
    renderer = Renderer(tokenizer, {"thinks": True})
    prompts = []
    for arguments in ({}, {"thinks": False}):
        sampler = ScriptedSampler(tokenizer, ("one", "two", "three"))
        task = EpisodeTask(TASK.messages, template_arguments=arguments)
        asyncio.run(run_episode(Questions, task, 7, sampler, renderer, WIDE))
        prompts.append([tokenizer.decode(call.tokens) for call in sampler.calls])
    assert [prompt.endswith("<think>") for prompt in prompts[0]] == [True] * 3
    assert not any("<think>" in prompt for prompt in prompts[1])


def test_a_long_result_of_a_tool_is_shortened() -> None:
    tool = {"role": "tool", "name": "look", "content": "€" * 6}

    async def step() -> Step:
        other = {"role": "user", "content": "€" * 6}
        return Step([tool, other], done=len(environment.actions) == 2)

    environment = Questions(step=step)
    episode, sampler = play(environment, limits(max_result_tokens=7))
    short = {**tool, "content": "€€\n(4 characters left out)"}
    assert episode.messages[2] == short
    assert episode.messages[3]["content"] == "€" * 6
    assert short["content"] in TOKENIZER.decode(sampler.calls[1].tokens)


def test_a_message_that_cannot_have_a_place_is_not_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop would stand still for seconds."""
    encoded: list[str] = []
    encode = SpelledTokens.encode

    def noted(self: SpelledTokens, texts: list[str], **options: Any) -> Ragged:
        encoded.extend(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(SpelledTokens, "encode", noted)

    async def step() -> Step:
        return Step([{"role": "user", "content": "x" * 5_000_000}])

    episode, _ = play(Questions(step=step))
    assert (episode.end, episode.num_turns) == (End.CONTEXT_OVERFLOW, 1)
    assert max(map(len, encoded)) < 1000


def test_a_first_prompt_without_a_place_for_a_turn_is_told_in_numbers() -> None:
    episode, _ = play(Questions(), limits(context_tokens=10))
    assert episode.end is End.ENVIRONMENT_FAILED
    assert episode.detail == (
        "it ended as context_overflow before the policy had a turn: its first prompt"
        f" has {len(RENDERER.begin(TASK.messages))} tokens, and with a turn it may have"
        " 10 (data.max_prompt_tokens + rollout.max_response_tokens)"
    )


def test_an_episode_that_completes() -> None:
    environment = Questions()
    episode, sampler = play(environment)
    assert (episode.end, episode.score, episode.num_turns) == (End.COMPLETED, 1.5, 3)
    assert environment.calls == ["reset 7", "step", "step", "step", "close"]
    assert [action.text for action in environment.actions] == ["one", "two", "three"]
    assert [message["content"] for message in episode.messages] == [
        "0?", "one", "1?", "two", "2?", "three",
    ]  # fmt: skip

    (row,) = episode.rows
    assert [reward for _, reward in row.rewards] == [0.5, 0.5, 0.5]
    ends = [
        at for at, token in enumerate(row.tokens) if token == TOKENIZER.eos_token_id
    ]
    # Ends of the user's turns stand between those of the policy's.
    assert [at for at, _ in row.rewards] == ends[1::2]
    assert [len(call.tokens) for call in sampler.calls] == [
        len(RENDERER.begin(episode.messages[:count])) for count in (1, 3, 5)
    ]
    assert row.tokens[: len(sampler.calls[2].tokens)] == sampler.calls[2].tokens


# --------------------------------------------------------------------------------- ends


async def stuck() -> Any:
    await asyncio.sleep(FOREVER)


async def stubborn() -> Any:
    """Ignore the first cancellation."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(FOREVER)
    await asyncio.sleep(FOREVER)


async def broken() -> Any:
    raise KeyError("no such door")


async def leaving() -> Any:
    sys.exit(3)


async def cancelled() -> Any:
    raise asyncio.CancelledError


def returns(value: Any) -> Callable[[], Awaitable[Any]]:
    async def hook() -> Any:
        return value

    return hook


HI: Message = {"role": "user", "content": "hi"}

ENDS: dict[str, tuple[Questions, dict[str, Any], End, int, float]] = {
    "turns": (Questions(), {"max_turns": 2}, End.MAX_TURNS, 2, 1.0),
    "tokens": (Questions(), {"max_tokens": 5}, End.MAX_TOKENS, 2, 1.0),
    "context": (Questions(), {"context_tokens": 24}, End.CONTEXT_OVERFLOW, 1, 0.5),
    "row": (Questions(), {"row_tokens": 14}, End.CONTEXT_OVERFLOW, 1, 0.5),
    "long prompt": (Questions(), {"context_tokens": 9}, End.ENVIRONMENT_FAILED, 0, 0.0),
    "slow model": (Questions(), {"model_s": SHORT_S}, End.MODEL_TIMEOUT, 0, 0.0),
    "slow reset": (Questions(reset=stuck), {"tool_s": SHORT_S}, End.TOOL_TIMEOUT, 0, 0.0),
    "slow step": (Questions(step=stuck), {"tool_s": SHORT_S}, End.TOOL_TIMEOUT, 1, 0.0),
    "slow turn": (Questions(step=stuck), {"turn_s": SHORT_S}, End.TURN_TIMEOUT, 1, 0.0),
    "slow": (Questions(step=stuck), {"episode_s": SHORT_S}, End.EPISODE_TIMEOUT, 1, 0.0),
    "stubborn": (Questions(step=stubborn), {"tool_s": SHORT_S}, End.TOOL_TIMEOUT, 1, 0.0),
    "broken reset": (Questions(reset=broken), {}, End.ENVIRONMENT_FAILED, 0, 0.0),
    "broken step": (Questions(step=broken), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "exit": (Questions(step=leaving), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "cancelled": (Questions(step=cancelled), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "nan": (Questions(step=returns(Step(reward=math.nan, done=True))), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "infinite": (Questions(step=returns(Step(reward=math.inf, done=True))), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "huge": (Questions(step=returns(Step(reward=-1e39, done=True))), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "text": (Questions(step=returns(Step(reward="1", done=True))), {}, End.ENVIRONMENT_FAILED, 1, 0.0),  # type: ignore[arg-type]
    "no step": (Questions(step=returns(None)), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "no observation": (Questions(reset=returns([])), {}, End.ENVIRONMENT_FAILED, 0, 0.0),
    "silent": (Questions(step=returns(Step(reward=0.25))), {}, End.ENVIRONMENT_FAILED, 1, 0.25),
    "odd message": (Questions(step=returns(Step([{"text": "hi"}]))), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "bytes": (Questions(step=returns(Step([{"role": "user", "content": b"hi"}]))), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "last bytes": (Questions(step=returns(Step([HI, {**HI, "of": {1, 2}}], 1.0, done=True))), {}, End.ENVIRONMENT_FAILED, 1, 0.0),
    "no dict": (Questions(step=returns(Step("hi"))), {}, End.ENVIRONMENT_FAILED, 1, 0.0),  # type: ignore[arg-type]
    "odd first": (Questions(reset=returns(Observation([{**HI, "of": Path()}]))), {}, End.ENVIRONMENT_FAILED, 0, 0.0),
    "odd tool": (Questions(reset=returns(Observation([HI], [{"function": print}]))), {}, End.ENVIRONMENT_FAILED, 0, 0.0),
    "own end": (Questions(step=returns(Step(done=True, end=End.TOOL_STOPPED))), {}, End.TOOL_STOPPED, 1, 0.0),
    "numpy": (Questions(step=returns(Step(reward=np.float32(0.5), done=True))), {}, End.COMPLETED, 1, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_each_end_is_reached_by_its_cause(name: str) -> None:
    environment, changes, end, num_turns, score = ENDS[name]
    delay_s = FOREVER if end is End.MODEL_TIMEOUT else 0.0
    episode, _ = play(environment, limits(**changes), delay_s=delay_s)
    assert (episode.end, episode.num_turns, episode.score) == (end, num_turns, score)
    assert environment.calls.count("close") == 1
    assert environment.calls[-1] == "close"
    assert bool(episode.detail) == (end is End.ENVIRONMENT_FAILED)


@pytest.mark.parametrize(
    "name, words",
    [
        ("broken step", "KeyError: 'no such door'"),
        ("exit", "RuntimeError: it raised SystemExit(3), which is no Exception"),
        (
            "bytes",
            "step returned the message 1, which cannot be written as JSON: Object",
        ),
        (
            "bytes",
            "type bytes is not JSON serializable. It begins with \"{'role': 'user",
        ),
        ("last bytes", "step returned the message 2, which cannot be written as JSON"),
        (
            "no dict",
            "message 1, which cannot be written as JSON: it is str, expected dict",
        ),
        ("odd first", "reset returned the message 1, which cannot be written as JSON"),
        ("odd tool", "reset returned the tool 1, which cannot be written as JSON"),
        ("cancelled", "the call cancelled itself"),
        ("nan", "step returned the reward nan, which is not finite"),
        ("huge", "step returned the reward -1e+39, beyond 1e18"),
        ("text", "step returned the reward '1', which is no number"),
        ("no step", "step returned NoneType, expected Step"),
        ("no observation", "reset returned list, expected Observation"),
        ("silent", "step returned no messages, and the episode goes on"),
    ],
)
def test_a_failure_says_what_happened(name: str, words: str) -> None:
    episode, _ = play(Questions(**ENDS[name][0]._hooks))
    assert words in episode.detail.splitlines()[-1]


class Panic(BaseException):
    """As those of extension modules in Rust."""


@pytest.mark.parametrize("kind", [Panic, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize(
    "where", ["factory", "reset", "step", "finish", "close", "run"]
)
def test_what_is_no_exception_ends_the_call_alone(where: str, kind: type) -> None:
    async def panicking(*_: Any) -> Any:
        raise kind("a panic")

    def make() -> Environment:
        raise kind("a panic")

    environment: Any = Valued(**{where: panicking})
    if where == "finish":
        environment.finish = panicking
    if where in ("factory", "run"):
        environment = {"factory": make, "run": panicking}[where]
    episode, _ = play(environment, limits(max_turns=2))

    # What closes is no part of the episode.
    assert episode.end is (
        End.MAX_TURNS if where == "close" else End.ENVIRONMENT_FAILED
    )
    if isinstance(environment, Questions):
        assert environment.calls.count("close") == 1
    last = episode.detail.splitlines()[-1]
    if where == "factory":
        assert last.endswith("a panic")
    elif kind is asyncio.CancelledError:
        assert last == "RuntimeError: the call cancelled itself"
        return
    else:
        words = f"it raised {kind.__name__}('a panic'), which is no Exception"
        assert last == f"RuntimeError: {words}"
    # The place is the user's, and nothing of ours stands before it.
    first_place = episode.detail.splitlines()[1]
    assert __file__ in first_place and 'raise kind("a panic")' in episode.detail


def test_a_factory_that_fails_is_a_failed_environment() -> None:
    def make() -> Environment:
        raise OSError("no such port")

    episode, _ = play(make)
    assert (episode.end, episode.rows) == (End.ENVIRONMENT_FAILED, [])
    assert episode.detail.endswith("OSError: no such port")
    assert __file__ in episode.detail


@pytest.mark.parametrize(
    "hook, words",
    [
        (broken, "KeyError: 'no such door'"),
        (stuck, "close did not return within 0.2 s"),
    ],
)
def test_an_episode_survives_a_close_that_fails(hook, words: str) -> None:
    episode, _ = play(Questions(close=hook))
    assert (episode.end, episode.score) == (End.COMPLETED, 1.5)
    assert episode.detail.endswith(words)


# ------------------------------------------------------------------------------- limits


def test_a_turn_gets_the_tokens_that_remain() -> None:
    # The words have 3 tokens each, and the end of the turn is another one.
    episode, sampler = play(Questions(), limits(max_tokens=5, context_tokens=1000))
    assert [call.max_tokens for call in sampler.calls] == [5, 1]
    assert sum(map(sum, [row.mask for row in episode.rows])) == 5

    start = len(RENDERER.begin(TASK.messages))
    for changes in ({"context_tokens": start + 9}, {"row_tokens": 9}):
        _, sampler = play(Questions(), limits(**changes))
        assert sampler.calls[0].max_tokens == 9
    _, sampler = play(Questions(), limits(max_tokens=None))
    assert sampler.calls[0].max_tokens == 1000 - start


def test_a_row_has_the_places_of_its_episode() -> None:
    """What begins a row in the middle of an episode gets no places of its own."""

    async def forgetful(task: EpisodeTask, policy: Policy) -> float:
        await policy.respond(task.messages)
        await policy.respond([{"role": "user", "content": "0123456789?"}])
        return 1.0

    _, sampler = play(forgetful, limits(row_tokens=20))
    lengths = [len(call.tokens) for call in sampler.calls]
    assert lengths[1] == lengths[0] + 9
    assert [call.max_tokens for call in sampler.calls] == [20, 11]


@pytest.mark.parametrize(
    "changes, end",
    [
        ({"max_tokens": 2}, End.MAX_TOKENS),
        ({"context_tokens": 12}, End.CONTEXT_OVERFLOW),
    ],
)
def test_the_last_turn_is_scored_though_it_was_cut(changes, end: End) -> None:
    assert len(RENDERER.begin(TASK.messages)) == 10
    step = Step(reward=0.25, done=True, end=End.MAX_TOKENS)
    environment = Valued(step=returns(step))
    episode, _ = play(environment, limits(**changes), texts=("a long answer",))
    # It does without a turn that was cut, and says what its state is worth.
    assert (episode.end, episode.score) == (end, 0.5)
    assert environment.actions[0].finish == "length"
    assert environment.calls[-2:] == [f"finish {end}", "close"]

    # Who is done has said what that is worth, whatever cut the turn.
    for said in (End.COMPLETED, End.MAX_TURNS):
        environment = Valued(step=returns(Step(reward=1.0, done=True, end=said)))
        episode, _ = play(environment, limits(**changes), texts=("a long answer",))
        assert (episode.end, episode.score) == (said, 1.0)
        assert environment.calls == ["reset 7", "step", "close"]


def calling(tokens: Any, text: str, finish: str) -> Action:
    return Action(tokens, text, (ToolCall("add", {}), ToolCall("add", {})), finish)


def test_tool_calls_are_counted() -> None:
    environment = Questions()
    episode, _ = play(environment, limits(max_tool_calls=4), read=calling)
    assert (episode.end, episode.num_tool_calls) == (End.MAX_TOOL_CALLS, 6)
    # The calls that are too many are not executed, and their tokens were sampled.
    assert (environment.calls.count("step"), episode.num_turns) == (2, 3)
    assert (episode.score, len(episode.rows[0].rewards)) == (1.0, 3)


def test_a_step_has_its_seconds_for_each_tool_call() -> None:
    async def slow() -> Step:
        await asyncio.sleep(0.3)
        return Step(done=True)

    def read(tokens: Any, text: str, finish: str) -> Action:
        return Action(tokens, text, [ToolCall("add", {})] * 1000, finish)

    bounds = limits(tool_s=SHORT_S)
    assert play(Questions(step=slow), bounds)[0].end is End.TOOL_TIMEOUT
    assert play(Questions(step=slow), bounds, read=read)[0].end is End.COMPLETED


def test_a_turn_that_was_cut_is_forgotten_by_the_next() -> None:
    """A conversation that no longer fits goes on with a shorter one."""

    async def compacting(task: EpisodeTask, policy: Policy) -> float:
        long = [{"role": "user", "content": "many words of a long conversation"}]
        action = await policy.respond(long)
        assert action.finish == "length"
        action = await policy.respond(task.messages)
        assert action.finish == "stop"
        return 1.0

    prompt = len(
        RENDERER.begin(
            [{"role": "user", "content": "many words of a long conversation"}]
        )
    )
    episode, _ = play(compacting, limits(context_tokens=prompt + 1))
    assert (episode.end, len(episode.rows)) == (End.COMPLETED, 2)


class Cutting(Questions):
    """Ends turns at a letter, at a number of tokens, and as they end by themselves."""

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        return Observation(task.messages, stop=("n",))

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        questions = [{"role": "user", "content": "?"}]
        last = Step(reward=1.0, done=True)
        return [Step(questions, max_tokens=2), Step(questions), last][
            len(self.actions) - 1
        ]


async def cut_twice(task: EpisodeTask, policy: Policy) -> float:
    messages = list(task.messages)
    for options in ({"stop": ["n"]}, {"max_tokens": 2}, {}):
        action = await policy.respond(messages, **options)
        messages += [message_of(action), {"role": "user", "content": "?"}]
    return 1.0


@pytest.mark.parametrize("environment", [Cutting, cut_twice])
def test_an_environment_says_where_a_turn_ends(environment: Any) -> None:
    episode, sampler = play(environment)
    assert (episode.end, episode.score) == (End.COMPLETED, 1.0)
    assert [message["content"] for message in episode.messages[::2]][:3] == [
        "0?",
        "?",
        "?",
    ]
    assert [
        each["content"] for each in episode.messages if each["role"] == "assistant"
    ] == ["on", "tw", "three"]
    assert [(tuple(call.stop), call.max_tokens == 2) for call in sampler.calls] == [
        (("n",), False),
        ((), True),
        ((), False),
    ]

    # The template ends the turn at the letter, which nobody sampled; what was cut by a
    # number of tokens begins a row.
    first, second = episode.rows
    written = [
        (TOKENIZER.decode([token]), own)
        for token, own in zip(first.tokens, first.mask, strict=True)
    ]
    start = len(RENDERER.begin(TASK.messages))
    assert written[start : start + 3] == [
        ("o", True),
        ("n", True),
        ("<|im_end|>", False),
    ]
    assert [text for text, own in written if own] == ["o", "n", "t", "w"]
    assert sum(second.mask) == len("three") + 1
    assert first.log_probs[start : start + 2] == [-0.01, -0.02]


def test_a_turn_is_never_longer_than_the_limits() -> None:
    async def generous(task: EpisodeTask, policy: Policy) -> float:
        await policy.respond(task.messages, max_tokens=10**9)
        return 1.0

    for changes in ({"max_turn_tokens": 7}, {"row_tokens": 7}, {"max_tokens": 7}):
        _, sampler = play(generous, limits(**changes))
        assert [call.max_tokens for call in sampler.calls] == [7]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_tokens": 0}, "ValueError: max_tokens = 0, expected at least 1"),
        ({"max_tokens": 2.0}, "TypeError: max_tokens = 2.0, expected an integer or None"),
        ({"max_tokens": True}, "TypeError: max_tokens = True, expected an integer or None"),
        ({"stop": "</a>"}, "TypeError: stop = '</a>', expected a list of texts"),
        ({"stop": [1]}, "TypeError: stop = [1], expected a list of texts"),
        ({"stop": ["a", ""]}, "ValueError: stop has an empty text, at which every turn would end"),
    ],
)  # fmt: skip
def test_a_turn_that_cannot_be_sampled_is_the_environments_fault(
    options, words: str
) -> None:
    episode, _ = play(
        Questions(step=returns(Step([{"role": "user", "content": "?"}], **options)))
    )
    assert (episode.end, episode.num_turns) == (End.ENVIRONMENT_FAILED, 1)
    assert episode.detail.endswith(words)


class Measured(Questions):
    """Records numbers about its episode."""

    def __init__(self, *metrics: Any) -> None:
        super().__init__()
        self._metrics = metrics

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        return replace(step, metrics=self._metrics[len(self.actions) - 1])


def test_an_environment_records_numbers_about_its_episode() -> None:
    episode, _ = play(Measured({"doors": 1, "falls": 0.5}, {}, {"doors": np.int64(3)}))
    assert (episode.end, episode.metrics) == (
        End.COMPLETED,
        {"doors": 3.0, "falls": 0.5},
    )

    async def measured(task: EpisodeTask, policy: Policy) -> float:
        policy.record(doors=1, self=2)
        policy.record(doors=3)
        return await ask_twice(task, policy)

    assert play(measured)[0].metrics == {"doors": 3.0, "self": 2.0}


@pytest.mark.parametrize(
    "metrics, words",
    [
        ({"doors": math.nan}, "ValueError: the metric doors is nan, which is not finite"),
        ({"doors": 1e19}, "ValueError: the metric doors is 1e+19, beyond 1e18"),
        ({"doors": "3"}, "TypeError: the metric doors is '3', which is no number"),
        ({"open doors": 1}, "ValueError: the metric 'open doors' needs a name of letters, digits and _"),
        ({"a/b": 1}, "ValueError: the metric 'a/b' needs a name of letters, digits and _"),
    ],
)  # fmt: skip
def test_what_is_no_metric_is_the_environments_fault(metrics: Any, words: str) -> None:
    episode, _ = play(Measured({"falls": 1}, metrics))
    assert (episode.end, episode.score) == (End.ENVIRONMENT_FAILED, 0.5)
    assert episode.detail.endswith(words)


def test_seeds_depend_on_episode_and_turn_alone() -> None:
    _, sampler = play(Questions())
    seeds = [call.seed for call in sampler.calls]
    assert seeds == [turn_seed(7, turn) for turn in range(3)]
    _, sampler = play(Questions(), texts=("other", "words", "here"), delay_s=0.001)
    assert [call.seed for call in sampler.calls] == seeds

    many = {turn_seed(seed, turn) for seed in range(100) for turn in range(100)}
    assert len(many) == 10_000
    assert min(many) >= 0
    assert max(many) < 2**63
    # Another process has the same ones, whatever its hash seed is.
    assert turn_seed(7, 0) == 7139497717793659302


def test_the_sampler_fails_on_its_own_account() -> None:
    environment = Questions()
    with pytest.raises(LookupError, match="the script has 1 texts"):
        play(environment, texts=("one",))
    assert environment.calls[-1] == "close"

    class Broken(ScriptedSampler):
        async def sample(self, *arguments: Any, **options: Any) -> Sampled:
            sampled = await super().sample(*arguments, **options)
            return Sampled(sampled.tokens, [], sampled.versions, sampled.action)

    sampler = Broken(TOKENIZER, ["one"])
    run = run_episode(Questions, TASK, 7, sampler, RENDERER, WIDE)
    with pytest.raises(ValueError, match="4 tokens and 0 log-probs"):
        asyncio.run(run)


def test_the_sampler_may_end_the_episode() -> None:
    class Stopped:
        async def sample(self, *arguments: Any, **options: Any) -> Sampled:
            raise EpisodeEnded(End.ABORTED)

    environment = Questions()
    episode = asyncio.run(
        run_episode(lambda: environment, TASK, 7, Stopped(), RENDERER, WIDE)
    )
    assert (episode.end, environment.calls) == (End.ABORTED, ["reset 7", "close"])

    async def catching(task: EpisodeTask, policy: Policy) -> float:
        with contextlib.suppress(EpisodeEnded):
            await policy.respond(task.messages)
        return 0.0

    run = run_episode(catching, TASK, 7, Stopped(), RENDERER, WIDE)
    assert asyncio.run(run).end is End.ABORTED


class Valued(Questions):
    """Says at a limit what its state is worth."""

    value: float = 0.25

    async def finish(self, end: End) -> float:
        self.calls.append(f"finish {end.value}")
        return self.value


def test_an_environment_says_what_its_state_is_worth_at_a_limit() -> None:
    environment = Valued()
    episode, _ = play(environment, limits(max_turns=2))
    assert (episode.end, episode.score) == (End.MAX_TURNS, 1.25)
    assert environment.calls[-2:] == ["finish max_turns", "close"]
    assert [reward for _, reward in episode.rows[0].rewards] == [0.5, 0.75]

    environment = Valued()
    assert play(environment)[0].score == 1.5
    assert "finish completed" not in environment.calls
    environment.value = math.nan
    episode, _ = play(environment, limits(max_turns=2))
    assert (episode.end, episode.score) == (End.ENVIRONMENT_FAILED, 1.0)
    assert "finish returned nan, which is not finite" in episode.detail


class Leaping(asyncio.SelectorEventLoop):
    """An event loop whose time may leap."""

    leaps_s = 0.0

    def time(self) -> float:
        return super().time() + self.leaps_s


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_pause_of_the_engine_is_no_time_of_the_episode(is_paused: bool) -> None:
    class Pausing(ScriptedSampler):
        async def sample(self, *arguments: Any, **options: Any) -> Sampled:
            if is_paused:
                clock.stop()
            runner.get_loop().leaps_s += FOREVER  # type: ignore[attr-defined]
            # Each wait of the episode sees that its time would be over.
            await asyncio.sleep(SHORT_S)
            clock.go()
            return await super().sample(*arguments, **options)

    bounds = limits(**dict.fromkeys(("model_s", "turn_s", "episode_s"), FOREVER / 2))
    with asyncio.Runner(loop_factory=Leaping) as runner:
        clock = Clock()
        sampler = Pausing(TOKENIZER, ["one", "two", "three"])
        episode = runner.run(
            run_episode(Questions, TASK, 7, sampler, RENDERER, bounds, clock=clock)
        )
    if is_paused:
        assert episode.rows == play(Questions())[0].rows
    else:
        assert episode.end is End.EPISODE_TIMEOUT


# ------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("where", ["reset", "step", "model"])
def test_a_cancelled_episode_is_closed(where: str) -> None:
    environment = Questions(**({} if where == "model" else {where: stuck}))
    delay_s = FOREVER if where == "model" else 0.0

    async def main() -> None:
        sampler = ScriptedSampler(TOKENIZER, ["one"], delay_s=delay_s)
        run = run_episode(lambda: environment, TASK, 7, sampler, RENDERER, WIDE)
        task = asyncio.create_task(run)
        reached = {"reset": 1, "step": 2}.get(where)
        while len(environment.calls) != reached and not sampler.calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert environment.calls.count("close") == 1
    assert environment.calls[-1] == "close"


def test_a_second_cancellation_does_not_wait_for_close() -> None:
    environment = Questions(step=stuck, close=stuck)

    async def main() -> None:
        sampler = ScriptedSampler(TOKENIZER, ["one"])
        bounds = limits(close_s=FOREVER)
        run = run_episode(lambda: environment, TASK, 7, sampler, RENDERER, bounds)
        task = asyncio.create_task(run)
        for name in ("step", "close"):
            while name not in environment.calls:
                await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert environment.calls.count("close") == 1


# --------------------------------------------------------------------------- coroutines


async def ask_twice(task: EpisodeTask, policy: Policy) -> float:
    messages: list[Message] = list(task.messages)
    for question in ("1?", "2?"):
        action = await policy.respond(messages)
        messages.append({"role": "assistant", "content": action.text})
        messages.append({"role": "user", "content": question})
    return 0.75


def test_a_coroutine_is_an_environment() -> None:
    episode, _ = play(ask_twice)
    assert (episode.end, episode.score, episode.num_turns) == (End.COMPLETED, 0.75, 2)
    (row,) = episode.rows
    # What it returns is paid to the last turn.
    assert [reward for _, reward in row.rewards] == [0.0, 0.75]
    assert [message["content"] for message in episode.messages] == ["0?", "one", "1?", "two"]  # fmt: skip


def test_a_coroutine_that_returns_no_number_failed() -> None:
    async def forgetful(task: EpisodeTask, policy: Policy) -> Any:
        await policy.respond(task.messages)

    episode, _ = play(forgetful)
    assert (episode.end, episode.score) == (End.ENVIRONMENT_FAILED, 0.0)
    assert (
        episode.detail == "TypeError: the coroutine returned None, which is no number"
    )


def test_a_coroutine_need_not_catch_the_end() -> None:
    episode, _ = play(ask_twice, limits(max_turns=1))
    assert (episode.end, episode.score, episode.num_turns) == (End.MAX_TURNS, 0.0, 1)


def test_a_coroutine_may_score_what_a_limit_ended() -> None:
    async def careful(task: EpisodeTask, policy: Policy) -> float:
        try:
            return await ask_twice(task, policy)
        except EpisodeEnded as ended:
            assert ended.end is End.MAX_TURNS
            # There is no way on.
            with pytest.raises(EpisodeEnded):
                await policy.respond(task.messages)
            return 0.25

    episode, sampler = play(careful, limits(max_turns=1))
    assert (episode.end, episode.score) == (End.MAX_TURNS, 0.25)
    assert episode.rows[0].rewards[0][1] == 0.25
    assert len(sampler.calls) == 1


@pytest.mark.parametrize("together", [1, 30])
def test_who_asks_again_and_again_after_the_end_is_cancelled(together: int) -> None:
    refused: list[str] = []

    async def ask(policy: Policy) -> None:
        try:
            await policy.respond(TASK.messages)
        except Exception as error:
            refused.append(repr(error))

    async def retrying(task: EpisodeTask, policy: Policy) -> float:
        # Its only way out is a number of answers that it never gets.
        while True:
            await asyncio.gather(*(ask(policy) for _ in range(together)))

    async def main() -> tuple[Episode, int]:
        sampler = ScriptedSampler(TOKENIZER, ["one"], repeats=True)
        run = run_episode(retrying, TASK, 7, sampler, RENDERER, limits(max_turns=2))
        task = asyncio.create_task(run)
        num_rounds = 0
        while not task.done():
            await asyncio.sleep(0)
            num_rounds += 1
        return await task, num_rounds

    episode, num_rounds = asyncio.run(main())
    assert (episode.end, episode.num_turns, episode.score) == (End.MAX_TURNS, 2, 0.0)
    assert episode.detail == ""
    assert set(refused) == {"EpisodeEnded('max_turns')"}
    # Those who ask together are refused together, and others had their turn meanwhile.
    assert len(refused) == {1: 11, 30: 298}[together]
    assert num_rounds > 10


def test_who_even_catches_its_cancellation_ends_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    async def stubborn(task: EpisodeTask, policy: Policy) -> float:
        nonlocal asked
        while True:
            with contextlib.suppress(BaseException):
                asked += 1
                await policy.respond(task.messages)

    async def main() -> Episode:
        sampler = ScriptedSampler(TOKENIZER, ["one"], repeats=True)
        bounds = limits(max_turns=2, episode_s=SHORT_S, close_s=0.01)
        episode = await run_episode(stubborn, TASK, 7, sampler, RENDERER, bounds)
        # Python says of both that it could not end them well.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
        gc.collect()
        assert len(asyncio.all_tasks()) == 1
        return episode

    episode = asyncio.run(main())
    assert (episode.end, episode.num_turns) == (End.EPISODE_TIMEOUT, 2)
    # It sleeps, and does not spin.
    assert asked < 20


def test_ends_in_a_group_of_errors_are_an_end() -> None:
    async def grouped(task: EpisodeTask, policy: Policy) -> float:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(policy.respond(task.messages))
        return 1.0

    assert play(grouped, limits(max_turns=2))[0].end is End.MAX_TURNS

    async def mixed(task: EpisodeTask, policy: Policy) -> float:
        raise ExceptionGroup("", [EpisodeEnded(End.MAX_TURNS), KeyError("door")])

    assert play(mixed)[0].end is End.ENVIRONMENT_FAILED


def test_an_end_in_a_frameworks_error_is_an_end() -> None:
    async def wrapping(task: EpisodeTask, policy: Policy) -> float:
        try:
            return await ask_twice(task, policy)
        except EpisodeEnded as error:
            raise RuntimeError("the agent failed") from error

    async def failing(task: EpisodeTask, policy: Policy) -> float:
        try:
            return await ask_twice(task, policy)
        except EpisodeEnded:
            raise KeyError("no score")  # noqa: B904

    # A score that could not be computed is none.
    assert play(failing, limits(max_turns=1))[0].end is End.ENVIRONMENT_FAILED
    assert play(wrapping, limits(max_turns=1))[0].end is End.MAX_TURNS
    assert play(wrapping)[0].end is End.COMPLETED


def test_a_coroutine_is_bounded() -> None:
    async def waiting(task: EpisodeTask, policy: Policy) -> float:
        await policy.respond(task.messages)
        await asyncio.sleep(FOREVER)
        return 1.0

    episode, _ = play(waiting, limits(episode_s=SHORT_S))
    assert (episode.end, episode.num_turns) == (End.EPISODE_TIMEOUT, 1)


def test_turns_that_are_asked_for_together_have_an_order() -> None:
    async def both(task: EpisodeTask, policy: Policy) -> float:
        questions: list[list[Message]] = [
            [{"role": "user", "content": content}] for content in ("a?", "b?")
        ]
        actions = await asyncio.gather(*map(policy.respond, questions))
        return len({action.text for action in actions})

    episode, sampler = play(both, limits(max_tokens=5), delay_s=0.001)
    assert (len(episode.rows), episode.score) == (2, 2.0)
    assert [call.seed for call in sampler.calls] == [turn_seed(7, 0), turn_seed(7, 1)]
    # The second turn has what the first one has not used.
    assert [call.max_tokens for call in sampler.calls] == [5, 1]
    assert sum(sum(row.mask) for row in episode.rows) <= 5


def test_each_conversation_is_kept_once_and_the_last_one_last() -> None:
    async def branching(task: EpisodeTask, policy: Policy) -> float:
        def ask(content: str) -> Message:
            return {"role": "user", "content": content}

        draft = await policy.respond([ask("a?")])
        begun = [ask("a?"), message_of(draft)]
        await policy.respond([ask("b?")])
        # Both go on from the draft, and the second one is a conversation of its own.
        await policy.respond([*begun, ask("c?")])
        await policy.respond([*begun, ask("d?")])
        return 1.0

    episode, _ = play(branching, texts=("one", "two", "three", "four"))
    words = [
        [message["content"] for message in messages]
        for messages in episode.conversations
    ]
    assert words == [
        ["b?", "two"], ["a?", "one", "c?", "three"], ["a?", "one", "d?", "four"],
    ]  # fmt: skip
    assert episode.messages == episode.conversations[-1] and len(episode.rows) == 3


def test_a_task_that_stays_behind_gets_no_turn() -> None:
    refused: list[End] = []

    async def main() -> Episode:
        async def later(policy: Policy) -> None:
            try:
                await policy.respond(TASK.messages)
            except EpisodeEnded as ended:
                refused.append(ended.end)

        async def run(task: EpisodeTask, policy: Policy) -> float:
            tasks.append(asyncio.create_task(later(policy)))
            await asyncio.sleep(0)
            return 1.0

        tasks: list[asyncio.Task[None]] = []
        sampler = ScriptedSampler(TOKENIZER, ["one"], delay_s=0.05)
        episode = await run_episode(run, TASK, 7, sampler, RENDERER, WIDE)
        await tasks[0]
        assert len(sampler.calls) == 1
        return episode

    episode = asyncio.run(main())
    assert refused == [End.ABORTED]
    assert (episode.rows, episode.num_turns, episode.score) == ([], 0, 1.0)


def test_what_is_no_json_is_refused_before_it_is_sampled() -> None:
    async def odd(task: EpisodeTask, policy: Policy) -> float:
        messages = [*task.messages]
        messages.append(message_of(await policy.respond(messages)))
        await policy.respond([*messages, {**HI, "content": b"hi"}])
        return 1.0

    async def with_tools(task: EpisodeTask, policy: Policy) -> float:
        await policy.respond(task.messages, [{"function": {"default": b""}}])
        return 1.0

    for environment, words in ((odd, "the message 3"), (with_tools, "the tool 1")):
        episode, _ = play(environment)
        assert episode.end is End.ENVIRONMENT_FAILED
        assert f"TypeError: respond was given {words}, which cannot" in episode.detail


def test_the_response_is_the_policys_own() -> None:
    """Another agent has the last word, as a message of an assistant."""
    last = {"role": "assistant", "content": "42"}
    episode, _ = play(Questions(step=returns(Step([last], done=True))))
    assert (episode.response, episode.messages[-1]) == ("one", last)
    assert play(Questions(reset=broken))[0].response == ""


def test_messages_that_the_template_refuses_are_the_environments_fault() -> None:
    async def odd(task: EpisodeTask, policy: Policy) -> float:
        await policy.respond([{"role": "assistant", "content": "", "tool_calls": [{}]}])
        return 1.0

    episode, sampler = play(odd)
    assert (episode.end, sampler.calls) == (End.ENVIRONMENT_FAILED, [])
    assert DataError.__name__ in episode.detail


# ------------------------------------------------------------------------------ numbers


def test_a_thousand_episodes_at_a_time_leave_nothing_behind() -> None:
    count = 1000
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    environments = [Questions() for _ in range(count)]
    most_tasks = 0

    class Gated(ScriptedSampler):
        """All turns wait until every episode has asked for one."""

        gate = asyncio.Event()
        waiting = 0

        async def sample(self, *arguments: Any, **options: Any) -> Sampled:
            nonlocal most_tasks
            self.waiting += 1
            if self.waiting == count:
                most_tasks = len(asyncio.all_tasks())
                self.gate.set()
            await self.gate.wait()
            return await super().sample(*arguments, **options)

    threads_before = threading.active_count()

    async def main() -> list[Episode]:
        sampler = Gated(TOKENIZER, ["one"], repeats=True)
        runs = [
            run_episode(
                lambda environment=environment: environment,
                TASK,
                7,
                sampler,
                RENDERER,
                WIDE,
            )
            for environment in environments
        ]
        episodes = await asyncio.gather(*runs)
        assert len(asyncio.all_tasks()) == 1
        return episodes

    episodes = asyncio.run(main())
    assert {episode.end for episode in episodes} == {End.COMPLETED}
    assert all(environment.calls.count("close") == 1 for environment in environments)
    # An episode is a task, and so are the call that it waits for and its model call.
    assert count < most_tasks <= 3 * count + 1
    # Tests before this one may have left threads, which may end meanwhile.
    assert threading.active_count() <= threads_before
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files + 2

    # An episode holds its rows, and nothing that made them.
    gc.collect()
    kinds = {type(thing) for thing in gc.get_objects()}
    assert kinds.isdisjoint({Transcript, SampledTurn, EpisodePolicy})
