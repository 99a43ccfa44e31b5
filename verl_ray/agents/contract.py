"""Parts of an episode: its task, its environment, its policy, and how it ends.

Invariant: plain values, without a framework. A user's environment needs nothing but
this module, and what was sampled reaches it as tokens and as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from verl_ray.columns.stages import Int16
from verl_ray.settings.episode_ends import FAULTS as FAULTS
from verl_ray.settings.episode_ends import LIMITS as LIMITS
from verl_ray.settings.episode_ends import MOST_TURNS as MOST_TURNS
from verl_ray.settings.episode_ends import TREATMENTS as TREATMENTS
from verl_ray.settings.episode_ends import End as End
from verl_ray.settings.episode_ends import Treatment as Treatment

Message = dict[str, Any]
"""A message as chat templates take it: role, content, and possibly tool_calls."""

ToolSchema = dict[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {...}}."""


Constraint = Mapping[str, Any]
"""What a turn has to be: {"json": SCHEMA} or {"json_object": True}, a JSON text, or
{"tools": NAMES}, one or several calls of tools of these names."""


@dataclass(frozen=True)
class EpisodeTask:
    """The record of a data set that an episode is about.

    Attributes:
        messages: The prompt, as messages.
        answer: What the record expects; None where it has no answer.
        extra: The other fields of the record.
        data_source: The data source of the record.
        template_arguments: What the record gives to the chat template, in all turns.
    """

    messages: Sequence[Message]
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    data_source: str = ""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the model's own format says it.

    Attributes:
        name: Name of the tool.
        arguments: Its keyword arguments.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Action:
    """One turn of the policy.

    Attributes:
        tokens: The sampled token ids.
        text: What was said, without the token that ended the turn; thoughts and tool
            calls are not part of it.
        tool_calls: The parsed tool calls, in order.
        finish: "stop" where the policy ended its turn, "length" where it was cut.
        parse_error: Why tool calls could not be parsed; None where they could.
        reasoning: The thoughts, without the marks around them.
        content: Thoughts and text as they were written, which stand for the turn in a
            conversation; None where the text does.
    """

    tokens: Sequence[int]
    text: str
    tool_calls: Sequence[ToolCall] = ()
    finish: str = "stop"
    parse_error: str | None = None
    reasoning: str = ""
    content: str | None = None


@dataclass(frozen=True)
class Observation:
    """The beginning of an episode, as the policy sees it.

    Attributes:
        messages: The conversation so far.
        tools: Schemas of the tools that the policy may call.
        stop: Texts that end the first turn; see `Policy.respond`.
        max_tokens: Most tokens of the first turn; None for the limits' own.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    stop: Sequence[str] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Step:
    """The environment's answer to an action.

    Attributes:
        messages: What the policy sees next, after its own action; empty where `done`.
        reward: The reward of the action. The rewards of an episode add up to its score.
        done: Whether the episode ends.
        end: Why it ends, where it is `done`. An answer that was cut (`Action.finish` is
            "length") may end as MAX_TOKENS: it then counts as cut, by whichever limit
            that was.
        stop: Texts that end the next turn; see `Policy.respond`.
        max_tokens: Most tokens of the next turn; None for the limits' own.
        metrics: Numbers about the episode, by name. A run records their means over the
            episodes that have them. A later value of a name replaces an earlier one.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    end: End = End.COMPLETED
    stop: Sequence[str] = ()
    max_tokens: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """An environment in which the policy acts. Each episode has an object of its own.

    One that also has `async def finish(self, end: End) -> float` is asked what its
    state is worth when a limit of the policy ends the episode before it is done. The
    class that a configuration names may have any of these without `async`: they run in
    threads.
    """

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Begin an episode. The same task and seed make the same environment."""

    async def step(self, action: Action) -> Step:
        """Take an action of the policy."""

    async def close(self) -> None:
        """Give back whatever the episode held. It is called once, however it ends."""


MOST_NESTED = 64
"""Levels of lists and objects in the arguments of a tool call; more are refused."""


def nests_too_deep(value: object) -> bool:
    """Return whether a plain value has more than `MOST_NESTED` levels in each other."""
    level = [value]
    for _ in range(MOST_NESTED):
        level = [part for outer in level for part in _parts(outer)]
    return any(isinstance(each, Mapping | list | tuple) for each in level)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


class Policy(Protocol):
    """The policy in an episode: it answers conversations."""

    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Action:
        """Return the policy's next turn after these messages.

        A conversation that continues an earlier one with the policy's own action, as
        `message_of` writes it, and further messages keeps its sampled tokens. Any other
        begins a row of its own.

        Args:
            stop: Texts that end the turn, in place of rollout.stop. The text is part of
                the turn, and so is what else the token says that completes it.
            max_tokens: Most tokens of the turn; None for the limits' own, which hold in
                any case.

        Raises:
            EpisodeEnded: A limit of the episode is reached. Whoever catches it and asks
                again and again is cancelled.
            TypeError: `stop` is not a list of texts, or `max_tokens` is not an integer.
            ValueError: A text is empty, or `max_tokens` is below 1.
        """

    def record(self, /, **metrics: float) -> None:
        """Keep numbers about the episode; see `Step.metrics`.

        Raises:
            TypeError: One is no number.
            ValueError: One is not finite, or beyond 1e18.
        """


class EpisodeEnded(Exception):
    """The episode is over; `end` says why. An environment need not catch it."""

    def __init__(self, end: End) -> None:
        """Take the reason."""
        super().__init__(end.value)
        self.end = end


def message_of(action: Action) -> Message:
    """Return an action as the message that stands for it in a conversation."""
    # Whether the thoughts in the content stay in later turns is the template's affair.
    content = action.text if action.content is None else action.content
    message: Message = {"role": "assistant", "content": content}
    if action.tool_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in action.tool_calls
        ]
    return message


@dataclass(frozen=True)
class Terms:
    """How the run samples an episode, and what becomes of its rows.

    Attributes:
        temperature: The temperature of its turns.
        top_p: The probability mass that is sampled from; 1 is all tokens.
        top_k: The number of tokens that are sampled from; -1 is all tokens.
        trains: Whether the policy learns from its rows.
        model: The policy's name for clients.
        reads_tools: Whether calls of tools are read in its turns.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    trains: bool = False
    model: str = "policy"
    reads_tools: bool = True


@dataclass(frozen=True)
class Sampled:
    """One sampled turn, as an engine returns it.

    Attributes:
        tokens: Token ids; the token that ended the turn is included.
        log_probs: Log-prob of each token at sampling.
        versions: Pairs of the index in `tokens` where a span begins and its policy
            version.
        action: The same as the environment sees it.
        routed_experts: The experts of all positions of prompt and turn but the last,
            [positions, layers, k], where they are recorded. They stay with the engine.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[tuple[int, int]]
    action: Action
    routed_experts: Int16 | None = None


Listener = Callable[[str, str], None]
"""Takes further thoughts of a turn, and further words behind them, while it is being
sampled: what its action begins with, as far as that is known."""


class Sampler(Protocol):
    """The engine's side of a policy: token ids in, token ids out."""

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        tools: Sequence[ToolSchema],
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        listener: Listener | None = None,
    ) -> Sampled:
        """Continue these token ids by a turn of at most `max_tokens` tokens.

        The same tokens, seed and policy version have the same continuation. The token
        that completes one of the texts `stop` ends it; without any the run's do. Under
        a constraint the log-probs are not those of the policy. Whoever listens is told
        the turn by parts, or nothing before it is whole: a sampler need not tell it.
        """


@dataclass
class EpisodeRow:
    """One token path of an episode: context and sampled tokens in turn.

    Attributes:
        tokens: Token ids of the whole path.
        mask: True on tokens that were sampled in this row and are not another row's.
        log_probs: Log-prob at sampling; 0 outside the mask.
        versions: Pairs of the index in `tokens` where a span begins and its policy
            version, for the tokens under the mask.
        rewards: Pairs of the index in `tokens` of the last token of a turn, and that
            turn's reward, in the order of time.
        turns: Number of each of these turns in the episode, from 0. Those of several
            rows may alternate.
        routed_experts: As in `Rows`, where they are recorded.
    """

    tokens: list[int]
    mask: list[bool]
    log_probs: list[float]
    versions: list[tuple[int, int]]
    rewards: list[tuple[int, float]]
    turns: list[int] = field(default_factory=list)
    routed_experts: Int16 | None = None


@dataclass
class Episode:
    """An episode that has ended.

    Attributes:
        rows: Its token paths, in the order of time; each sampled token is under the
            mask of exactly one.
        end: Why it ended.
        score: The sum of its rewards.
        detail: For a person: what failed; empty where nothing did.
        num_turns: Turns of the policy.
        num_tool_calls: Tool calls of the policy.
        conversations: Its conversations, in the order of their last turns. One that
            another continues is part of that.
        metrics: What the environment has recorded about it, by name.
        response: Text of the policy's last turn; empty where it had none.
        output: What a command that ran it has printed, or the end of that; empty where
            there was none.
    """

    rows: list[EpisodeRow]
    end: End
    score: float
    detail: str = ""
    num_turns: int = 0
    num_tool_calls: int = 0
    conversations: list[list[Message]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    response: str = ""
    output: str = ""

    @property
    def messages(self) -> list[Message]:
        """The conversation of the last turn; empty where there is none."""
        return self.conversations[-1] if self.conversations else []
