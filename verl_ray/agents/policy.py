"""The policy in one episode: its limits, its turns, and what it is paid.

Invariant: each sampled token is in the transcript, and after the end of the episode no
turn is sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any

from verl_ray.agents.contract import (
    Action,
    End,
    Episode,
    EpisodeEnded,
    Listener,
    Message,
    Sampled,
    Sampler,
    Terms,
    ToolSchema,
    message_of,
)
from verl_ray.agents.deadlines import Clock, Late, bounded
from verl_ray.agents.returned import number_of, require_json, require_sampling
from verl_ray.agents.template import Renderer, TextTooLong
from verl_ray.agents.transcript import SampledTurn, Transcript, TurnPrompt

CONTEXT_KEYS = "data.max_prompt_tokens + rollout.max_response_tokens"
"""The settings of a run whose sum is `Limits.context_tokens`."""

_MOST_REFUSALS = 10
"""How often whoever asks for a turn of an episode that is over is told so."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an episode.

    Attributes:
        max_turns: Turns of the policy.
        context_tokens: Tokens of a prompt with the turn that follows it.
        row_tokens: Tokens of a row beyond those of the episode's first prompt; None is
            no limit of its own.
        max_tokens: Sampled tokens of all turns together; None is no limit.
        max_tool_calls: Tool calls of all turns together; None is no limit.
        max_turn_tokens: Sampled tokens of one turn; None is no limit of its own. A turn
            that it cuts ends like any other, and the next one begins a row.
        max_result_tokens: Tokens of a message of a tool in a step; the rest of a longer
            one is left out. None is no limit.
        model_s: Seconds of one turn of the model; infinity is no limit, here and below.
        tool_s: Seconds of one call of the environment. A step may take this long for
            each of its tool calls.
        turn_s: Seconds of a turn of the model with the step that follows it.
        episode_s: Seconds of everything but `close`. It alone bounds what a coroutine
            function does between its turns.
        close_s: Seconds of `close`, and of the cleaning up in a call that is stopped.

    Seconds are those of the `Clock` of the episodes.
    """

    max_turns: int
    context_tokens: int
    row_tokens: int | None = None
    max_tokens: int | None = None
    max_tool_calls: int | None = None
    max_turn_tokens: int | None = None
    max_result_tokens: int | None = None
    model_s: float = math.inf
    tool_s: float = math.inf
    turn_s: float = math.inf
    episode_s: float = math.inf
    close_s: float = 10.0


Branch = tuple[int, bytes, int, str]
"""A turn's number in its path, the digest of its prompt's tokens, how many turns were
asked for before in the same words, and how it was to be sampled.
"""


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn, in [0, 2^63).

    Args:
        seed: The seed of the episode.
        turn: The number of the turn, from 0.
    """
    return _seed_of(f"{seed}:turn:{turn}".encode())


def branch_seed(seed: int, branch: Branch) -> int:
    """Return the seed of a turn that may have others beside it, in [0, 2^63).

    Args:
        seed: The seed of the episode.
        branch: The place of the turn, which alone decides, whenever others are sampled.
            Where it is to be cut decides nothing.
    """
    depth, digest, number, _ = branch
    return _seed_of(f"{seed}:branch:{depth}:{number}:".encode() + digest)


def _seed_of(name: bytes) -> int:
    digest = hashlib.blake2b(name, digest_size=8).digest()
    # Seeds are signed, so the highest bit is left out.
    return int.from_bytes(digest, "little") >> 1


class NoPlace(Exception):
    """A prompt leaves no place for a turn; the message says how long it is."""


class EpisodePolicy:
    """The policy in one episode, which counts its turns and keeps their tokens.

    `respond` samples turns one after the other, also if an environment asks for several
    at a time. So each has its number, and what remains of the tokens is known. `answer`
    samples them beside each other, for agents that are programs of their own.
    """

    def __init__(
        self,
        seed: int,
        sampler: Sampler,
        renderer: Renderer,
        limits: Limits,
        clock: Clock,
        terms: Terms | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Begin an episode.

        Args:
            seed: The seed of the episode.
            terms: How its turns are sampled.
            tell: Says something to whoever watches the run.
        """
        self.terms = terms or Terms()
        self.tell = tell
        self.output = ""
        """What an agent has printed."""
        self.transcript = Transcript(renderer)
        self.conversations: list[list[Message]] = []
        """Conversations, of which the last one is that of the last turn."""
        self.num_tool_calls = 0
        self.end: End | None = None
        """Why no further turn is sampled; None while one may be."""
        self.overflow = ""
        """Why the episode's first prompt has no place for a turn; empty if it has."""
        self.failure: Exception | None = None
        """What the sampler raised."""
        self.score = 0.0
        self.metrics: dict[str, float] = {}

        self.renderer = renderer
        self._seed = seed
        self._sampler = sampler
        self.limits = limits
        self.clock = clock
        self.deadline_s = clock.now() + limits.episode_s
        """When the episode ends at the latest, by its clock."""
        self._num_tokens = 0
        self._num_refusals = 0
        self._turn = asyncio.Lock()

        self.is_closed = False
        """Whether the rows are as they will be, whatever is still being sampled."""
        self._num_open = 0
        # Beginnings and ends of turns are events.
        self._num_events = self._last_call = self._num_calls = 0
        self._last: SampledTurn | None = None
        self._has_parallel = False
        self._num_asked: Counter[tuple[bytes, str]] = Counter()
        self._places: dict[SampledTurn, tuple[int, Branch]] = {}
        self._last_turns: list[SampledTurn] = []
        """The turn that ends each conversation."""
        self._cuts: dict[SampledTurn, End] = {}
        """The limit that cut each turn that was cut by one."""

    @property
    def num_turns(self) -> int:
        """Turns that were sampled."""
        return len(self.transcript.turns)

    @property
    def num_turns_left(self) -> int:
        """Turns that may be sampled beside those that are being sampled."""
        return self.limits.max_turns - self.num_turns - self._num_open

    @property
    def last_turn(self) -> SampledTurn | None:
        """The turn that is paid and graded; None where there is none."""
        turns = self.transcript.turns
        return self._last or (turns[-1] if turns else None)

    @property
    def cut(self) -> End | None:
        """The limit that cut the last turn; None if it was not cut."""
        turn = self.last_turn
        return None if turn is None else self._cuts.get(turn)

    @property
    def response(self) -> str:
        """The last turn as text, thoughts included; empty where there is none."""
        turn = self.last_turn
        return "" if turn is None else str(message_of(turn.sampled.action)["content"])

    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Action:
        """Return the policy's next turn after these messages; see `Policy`.

        Raises:
            EpisodeEnded: A limit of the episode is reached.
            CancelledError: It was told so again and again.
            TypeError: `stop` or `max_tokens` is of another type, or a message or a tool
                cannot be written as JSON.
            ValueError: A text to stop at is empty, or `max_tokens` is below 1.
            DataError: The chat template refuses the messages.
            Exception: Whatever the sampler raises.
        """
        num_earlier = self._num_refusals
        # Whoever asks again after any failure must let other episodes go on.
        await asyncio.sleep(0)
        require_sampling(stop, max_tokens)
        async with self._turn:
            if self.end is not None or self.failure is not None:
                await self._refuse(num_earlier)
            known = self.conversations[-1] if self.conversations else ()
            require_json(messages, "respond was given the message", known)
            require_json(tools, "respond was given the tool")
            first = self.transcript.turns[0].context if self.num_turns else None
            try:
                prompt, most, limit = self._prompt(messages, tools, first)
            except NoPlace as error:
                raise self._overflowing(str(error)) from None
            bound = min(most, self.limits.max_turn_tokens or most, max_tokens or most)
            seed = turn_seed(self._seed, self.num_turns)
            sampled = await self._sample(prompt, tools, bound, stop, seed)
            # The episode may have ended meanwhile; its rows do not change any more.
            self._require_open()
            turn = self._record(prompt, sampled, bound)
            action = sampled.action
            self._keep(messages, turn)
            if action.finish == "length" and bound == most:
                self._cuts[turn] = limit
            self._count_calls(action)
            return action

    async def answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        constraint: Mapping[str, Any] | None = None,
        listened: Callable[[int], Listener] | None = None,
    ) -> tuple[SampledTurn, int]:
        """Return a turn after these messages, and the tokens of its prompt.

        Others may be sampled at the same time. Its seed follows from its own branch, so
        that who is asked first, or is done first, makes no difference. Only the limit
        `max_tokens` lets turns wait for each other: what remains has to be known.

        Args:
            constraint: What constrains the tokens; see `Sampler`.
            listened: Takes the number of tokens of the prompt, and returns what
                listens; None if nothing does.

        Raises:
            EpisodeEnded: A limit of the episode is reached.
            NoPlace: The prompt leaves no place for a turn; the episode goes on.
            DataError: The chat template refuses the messages.
            Exception: Whatever the sampler raises.
        """
        self._require_open()
        async with self._place_in_time():
            self._require_open()
            try:
                prompt, most, limit = self._prompt(messages, tools, None)
            except NoPlace as error:
                self._note_overflow(str(error))
                raise
            terms = repr((tuple(stop), max_tokens, constraint))
            branch = self._next_branch(prompt, terms)
            self._num_events += 1
            self._last_call = self._num_events
            bound = min(most, self.limits.max_turn_tokens or most, max_tokens or most)
            seed = branch_seed(self._seed, branch)
            self._num_open += 1
            listener = listened and listened(len(prompt.tokens))
            try:
                sampled = await self._sample(
                    prompt, tools, bound, stop, seed, constraint, listener
                )
            finally:
                self._num_open -= 1
            # A limit that another turn has reached meanwhile does not undo this one.
            if self.is_closed:
                self._require_open()
            turn = self._record(prompt, sampled, bound, is_alternative=True)
            self._num_events += 1
            self._places[turn] = (self._num_events, branch)
            self._keep(messages, turn)
            if sampled.action.finish == "length" and bound == most:
                self._cuts[turn] = limit
            self._count_calls(sampled.action)
            return turn, len(prompt.tokens)

    def _next_branch(self, prompt: TurnPrompt, terms: str) -> Branch:
        tokens = hashlib.blake2b(prompt.tokens.tobytes()).digest()
        number = self._num_asked[tokens, terms]
        self._num_asked[tokens, terms] += 1
        return prompt.depth, tokens, number, terms

    @contextlib.asynccontextmanager
    async def _place_in_time(self) -> AsyncIterator[None]:
        """Count a call of `answer` for the time of a block, which may wait first."""
        self._num_calls += 1
        self._has_parallel |= self._num_calls > 1
        try:
            if self.limits.max_tokens is None:
                yield
            else:
                async with self._turn:
                    yield
        finally:
            self._num_calls -= 1

    def settle(self, unread: Collection[SampledTurn]) -> None:
        """Order what was sampled: no further turn is recorded.

        Turns of calls of which none overlapped stay in the order of time. That of
        others is chance, so they are ordered by what they answer, and of alternatives
        the first stands last; but what the last call has answered stays behind them,
        unless nobody has received it.

        Args:
            unread: Turns that nobody has received. None of them is the last one, which
                is paid and graded, unless there are no others.
        """
        self.is_closed = True
        turns = self.transcript.turns

        def place(turn: SampledTurn) -> tuple[bool, int, bytes, int, str]:
            ended, (depth, digest, number, terms) = self._places[turn]
            is_last = ended > self._last_call and turn not in unread
            return (is_last, depth, digest, -number, terms)

        if self._has_parallel:
            turns.sort(key=place)
        places = {turn: number for number, turn in enumerate(turns)}
        read = [turn for turn in turns if turn not in unread]
        if read:
            self._last = read[-1]
            places[self._last] = len(turns)
        if unread:
            self.record(unread_turns=float(len(unread)))
        spoken = sorted(
            zip(self._last_turns, self.conversations, strict=True),
            key=lambda pair: places[pair[0]],
        )
        self.conversations = [messages for _, messages in spoken]

    def num_prompt_tokens(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> int:
        """Return how many tokens a conversation has up to its next turn.

        Raises:
            DataError: The chat template refuses the messages.
            TextTooLong: They are more than the model's context.
        """
        most = self.limits.context_tokens
        return len(self.transcript.prompt(messages, tools, most).tokens)

    def episode(self, end: End, detail: str) -> Episode:
        """Return the episode, which has ended.

        Args:
            end: Why it has ended.
            detail: What failed; empty where nothing did.
        """
        return Episode(
            rows=self.transcript.rows(),
            end=end,
            score=self.score,
            detail=detail,
            num_turns=self.num_turns,
            num_tool_calls=self.num_tool_calls,
            conversations=self.conversations,
            metrics=self.metrics,
            response=self.response,
            output=self.output,
        )

    def as_read(self, messages: Sequence[Message]) -> list[Message]:
        """Return what a step adds to the conversation, with long results shortened."""
        most = self.limits.max_result_tokens
        if most is None:
            return list(messages)
        return [
            self.renderer.shortened(message, most)
            if isinstance(message, dict) and message.get("role") == "tool"
            else message
            for message in messages
        ]

    def pay(self, reward: float) -> None:
        """Add a reward to the last turn."""
        self.score += reward
        turn = self.last_turn
        if turn is not None:
            turn.reward += reward

    def record(self, /, **metrics: float) -> None:
        """Keep numbers about the episode; see `Policy`.

        Raises:
            TypeError: One is no number, or there is no mapping of names.
            ValueError: One is not finite or beyond 1e18, or its name is no identifier.
        """
        for name, value in metrics.items():
            if not (name.isascii() and name.isidentifier()):
                raise ValueError(
                    f"the metric {name!r} needs a name of letters, digits and _"
                )
            self.metrics[name] = number_of(value, f"the metric {name} is")

    def over(self, end: End) -> EpisodeEnded:
        """End the episode, unless it has ended, and return the exception for it."""
        if self.end is None:
            self.end = end
        return EpisodeEnded(self.end)

    @property
    def has_insisted(self) -> bool:
        """Whether turns were asked for so often after the end that it was cancelled."""
        return self._num_refusals > _MOST_REFUSALS

    async def _refuse(self, num_earlier: int) -> None:
        """Refuse a turn, since the episode is over.

        Args:
            num_earlier: The refusals at the time of asking. Those who ask together are
                refused together, which counts once.
        """
        if num_earlier > _MOST_REFUSALS:
            # Whoever catches its cancellation is left to its deadline. Nobody refers to
            # a task that waits here after the episode, so that it goes as garbage.
            await asyncio.get_running_loop().create_future()
        if num_earlier == self._num_refusals:
            self._num_refusals += 1
        # A loop that tries again after every `Exception` would not end.
        if self.has_insisted:
            raise asyncio.CancelledError
        if self.failure is not None:
            raise self.failure
        self._require_open()

    def _require_open(self) -> None:
        if self.end is not None:
            raise EpisodeEnded(self.end)

    def _keep(self, messages: Sequence[Message], turn: SampledTurn) -> None:
        """Keep the conversation of a turn, in the place of the one it continues."""
        spoken = list(messages)
        for number in reversed(range(len(self.conversations))):
            earlier = self.conversations[number]
            if spoken[: len(earlier)] == earlier:
                del self.conversations[number]
                del self._last_turns[number : number + 1]
                break
        self._last_turns.append(turn)
        self.conversations.append([*spoken, message_of(turn.sampled.action)])

    def _count_calls(self, action: Action) -> None:
        """Count the tool calls of a turn.

        Raises:
            EpisodeEnded: They are more than an episode may have.
        """
        self.num_tool_calls += len(action.tool_calls)
        most = self.limits.max_tool_calls
        if most is not None and self.num_tool_calls > most:
            raise self.over(End.MAX_TOOL_CALLS)

    def _prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        first: Sequence[int] | None,
    ) -> tuple[TurnPrompt, int, End]:
        """Return the prompt of the next turn, its most tokens, and what limits them.

        Args:
            first: The first prompt, beyond which a row is bounded; None is that of the
                row itself.

        Raises:
            EpisodeEnded: A limit of the episode is reached.
            NoPlace: The prompt leaves no place for a turn.
        """
        if self.num_turns_left < 1:
            raise self.over(End.MAX_TURNS)
        remaining = self._remaining_tokens()
        if remaining < 1:
            raise self.over(End.MAX_TOKENS)

        most = self._most_tokens(first)
        try:
            prompt = self.transcript.prompt(messages, tools, most - 1)
        except TextTooLong as error:
            raise NoPlace(f"at least {error.least_tokens}") from None
        places = self._most_tokens(first or prompt.first) - len(prompt.tokens)
        if places < 1:
            raise NoPlace(str(len(prompt.tokens)))
        limit = End.CONTEXT_OVERFLOW if places < remaining else End.MAX_TOKENS
        return prompt, int(min(remaining, places)), limit

    def _overflowing(self, tokens: str) -> EpisodeEnded:
        """End the episode, since a prompt leaves no place for a turn.

        Args:
            tokens: How many tokens the prompt has.
        """
        self._note_overflow(tokens)
        return self.over(End.CONTEXT_OVERFLOW)

    def _note_overflow(self, tokens: str) -> None:
        if not self.num_turns:
            self.overflow = (
                f"its first prompt has {tokens} tokens, and with a turn it may have"
                f" {self.limits.context_tokens} ({CONTEXT_KEYS})"
            )

    def _remaining_tokens(self) -> float:
        """Return how many tokens the episode may sample, possibly infinity."""
        if self.limits.max_tokens is None:
            return math.inf
        return self.limits.max_tokens - self._num_tokens

    def _most_tokens(self, first: Sequence[int] | None) -> int:
        """Return how many tokens a prompt and the turn that follows it may have.

        Whether they continue a row or begin one makes no difference.

        Args:
            first: The first prompt; None until it is made.
        """
        most = self.limits.context_tokens
        if self.limits.row_tokens is None or first is None:
            return most
        return min(most, len(first) + self.limits.row_tokens)

    async def _sample(
        self,
        prompt: TurnPrompt,
        tools: Sequence[ToolSchema],
        max_tokens: int,
        stop: Sequence[str],
        seed: int,
        constraint: Mapping[str, Any] | None = None,
        listener: Listener | None = None,
    ) -> Sampled:
        until_s = self.clock.now() + self.limits.model_s

        # A sampler need not know of what nobody names.
        terms: dict[str, Any] = {"stop": stop} if stop else {}
        if constraint is not None:
            terms["constraint"] = constraint
        if listener is not None:
            terms["listener"] = listener

        def sample() -> Awaitable[Sampled]:
            return self._sampler.sample(
                prompt.tokens,
                seed=seed,
                max_tokens=max_tokens,
                tools=tools,
                **terms,
            )

        try:
            return await bounded(sample, self.clock, until_s, self.limits.close_s)
        except Late:
            raise self.over(End.MODEL_TIMEOUT) from None
        except EpisodeEnded as ended:
            raise self.over(ended.end) from None
        except Exception as error:
            # A constraint may be what the sampler refuses.
            if constraint is None:
                self.failure = error
            raise

    def _record(
        self,
        prompt: TurnPrompt,
        sampled: Sampled,
        max_tokens: int,
        *,
        is_alternative: bool = False,
    ) -> SampledTurn:
        try:
            turn = self.transcript.record(
                prompt, sampled, max_tokens, is_alternative=is_alternative
            )
        except ValueError as error:
            self.failure = error
            raise
        self._num_tokens += len(sampled.tokens)
        return turn
