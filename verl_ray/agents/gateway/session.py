"""The session of an agent: what its requests ask of the policy, and how it ends.

Invariant: a request is sampled once. One that comes again, since its client waited no
longer or lost the answer, is answered from the record. Nothing is sampled for an agent
whose episode is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ray.agents.contract import (
    End,
    EpisodeEnded,
    EpisodeTask,
    Message,
    Sampled,
    message_of,
)
from verl_ray.agents.gateway.calls import CallChoice, CallReply, ModelCall, Protocol
from verl_ray.agents.gateway.conversation import in_order, served
from verl_ray.agents.gateway.echoes import Echoes
from verl_ray.agents.gateway.launch import Door, Launch
from verl_ray.agents.policy import EpisodePolicy, NoPlace
from verl_ray.agents.returned import number_of
from verl_ray.agents.template import TextTooLong
from verl_ray.errors import AgentFailed, CallRefused, DataError

_AFTER_END_S = 10.0
"""Seconds that an agent may take once it was told that its episode is over."""

_MOST_REFUSALS = 100
"""Calls after the end for which an agent is stopped before."""

_LEADING = ("system",)


@dataclass(eq=False)
class Answer:
    """An answer of the record.

    Attributes:
        reply: The task that makes it.
        was_delivered: Whether a client has all of it.
    """

    reply: asyncio.Task[CallReply]
    was_delivered: bool = False


@dataclass(eq=False)
class AgentSession:
    """The session of an episode's agent.

    Attributes:
        policy: The policy in the episode.
        reward: Where the reward comes from; see `Launch`.
        posted: The reward that the agent has posted; None until it has.
        is_over: Whether its calls are refused, whatever the policy may do.
    """

    policy: EpisodePolicy
    reward: str
    posted: float | None = None
    is_over: bool = False
    _echoes: Echoes = field(default_factory=Echoes)
    _answers: dict[bytes, Answer] = field(default_factory=dict)
    _conversations: dict[str, list[Message]] = field(default_factory=dict)
    _num_other_terms: int = 0
    _num_refusals: int = 0
    _was_refused: asyncio.Event = field(default_factory=asyncio.Event)
    _last_limit: End | None = None
    """The limit that the agent's last answer was about; None if it was about none."""

    # --------------------------------------------------------------------------- calls

    def answer(
        self, protocol: Protocol, call: ModelCall, body: bytes, *, is_retry: bool
    ) -> Answer:
        """Return the answer to a request, which is sampled unless it is known.

        Args:
            body: The request as it came.
            is_retry: Whether its client says that it asks again.
        """
        name = type(protocol).__name__.encode()
        key = hashlib.blake2b(name + body, digest_size=16).digest()
        known = self._answers.get(key)
        if known is not None and (is_retry or not known.was_delivered):
            return known
        answer = Answer(asyncio.create_task(self._reply(protocol, call)))
        self._answers[key] = answer

        def forget_refusal(task: asyncio.Task[CallReply]) -> None:
            # Whatever was refused may be asked again.
            refused = task.cancelled() or task.exception() is not None
            if refused and self._answers.get(key) is answer:
                del self._answers[key]

        answer.reply.add_done_callback(forget_refusal)
        return answer

    async def _reply(self, protocol: Protocol, call: ModelCall) -> CallReply:
        self._check_terms(call)
        conversation = self._conversation(call)
        messages = self._echoes.recalled(conversation)

        async def turn() -> tuple[Sampled, int]:
            return await self.policy.answer(
                messages,
                call.tools,
                stop=call.stop,
                max_tokens=call.max_tokens,
                constraint=call.constraint,
            )

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(turn()) for _ in range(max(1, call.num_choices))
                ]
        except BaseExceptionGroup as errors:
            raise self._refusal(errors.exceptions[0]) from None
        turns = [task.result() for task in tasks]
        is_cut = any(each.action.finish == "length" for each, _ in turns)
        self._last_limit = (self.policy.cut or End.MAX_TOKENS) if is_cut else None
        choices = [self._choice(call, sampled) for sampled, _ in turns]
        for choice in choices:
            echo, own = served(choice, call.stop), message_of(choice.sampled.action)
            self._echoes.record(conversation, echo, own)

        reply = CallReply(
            number=uuid.uuid4().hex,
            model=self.policy.terms.model,
            created=int(time.time()),
            num_prompt_tokens=turns[0][1],
            choices=choices,
        )
        turn_served = served(choices[0], call.stop)
        whole = [*conversation, turn_served]
        self._conversations[protocol.response_id(reply)] = whole
        return reply

    def num_tokens(self, call: ModelCall) -> int:
        """Return how many tokens the prompt of a call has."""
        try:
            messages = self._echoes.recalled(self._conversation(call))
            return self.policy.num_prompt_tokens(messages, call.tools)
        except Exception as error:
            raise self._refusal(error) from None

    def _conversation(self, call: ModelCall) -> list[Message]:
        """Return all messages of a call, those of the answer that it names included."""
        if call.previous is None:
            return list(call.messages)
        earlier = self._conversations.get(call.previous)
        if earlier is None:
            raise CallRefused(
                f"no answer of this episode has the id {call.previous!r}",
                "previous_response_id",
                status=404,
            )
        # What instructs the policy now takes the place of what did before.
        leading = _num_leading(call.messages)
        behind = earlier[_num_leading(earlier) :] if leading else earlier
        whole = [*call.messages[:leading], *behind, *call.messages[leading:]]
        # Only here the results are beside their calls.
        return in_order(whole)

    def _check_terms(self, call: ModelCall) -> None:
        """Refuse what no policy is trained by, and count what the run decides."""
        terms = self.policy.terms
        if call.constraint is not None and terms.trains:
            raise CallRefused(
                "what constrains the tokens (response_format, text.format, a required"
                " tool) is served in evaluations only: a constrained turn is not the"
                " policy's, and this episode is learned from; ask for it in the prompt"
            )
        own = {
            "temperature": terms.temperature,
            "top_p": terms.top_p,
            "top_k": terms.top_k,
        }
        others = {
            name: value
            for name, value in call.sampling.items()
            if own.get(name) != value
        }
        if not others:
            return
        self._num_other_terms += 1
        self.policy.record(other_sampling=float(self._num_other_terms))
        self.policy.tell(
            f"an agent asks for {', '.join(sorted(others))}; the run's own sampling and"
            " seeds hold (rollout.temperature, rollout.top_p, rollout.top_k), and"
            " episode/world/other_sampling counts such requests"
        )

    def _choice(self, call: ModelCall, sampled: Sampled) -> CallChoice:
        texts: list[str] = []
        if call.has_log_probs or call.stop:
            decode = self.policy.renderer.tokenizer.decode
            texts = [str(decode([token])) for token in sampled.tokens]
        ids = [uuid.uuid4().hex for _ in sampled.action.tool_calls]
        return CallChoice(sampled=sampled, call_ids=ids, token_texts=texts)

    def _refusal(self, error: BaseException) -> BaseException:
        """Return an error as what the client is told."""
        if isinstance(error, NoPlace | TextTooLong):
            self._last_limit = End.CONTEXT_OVERFLOW
            most = self.policy.limits.context_tokens
            tokens = error.args[0]
            return CallRefused(
                f"the prompt has {tokens} tokens, and with a turn it may have {most}",
                "messages",
                code="context_length_exceeded",
            )
        if isinstance(error, EpisodeEnded):
            self._num_refusals += 1
            self._was_refused.set()
            return CallRefused(
                f"the episode is over: {error.end}", status=403, code="episode_over"
            )
        if isinstance(error, DataError):
            return CallRefused(str(error), "messages")
        if self.policy.failure is not None:
            self._was_refused.set()
        return error

    # -------------------------------------------------------------------------- reward

    def post(self, value: object) -> None:
        """Take the reward that the agent posts.

        Raises:
            CallRefused: It is no finite number, another one was posted before, or the
                reward comes from elsewhere.
        """
        if self.reward != "post":
            raise CallRefused(
                f"the reward of this agent is not posted (reward: {self.reward}); set"
                " reward: post beside its command"
            )
        try:
            number = number_of(value, "the reward is")
        except (TypeError, ValueError) as error:
            raise CallRefused(str(error), "reward") from None
        if self.posted not in (None, number):
            raise CallRefused(
                f"the reward {self.posted} was posted before, and an episode has one",
                "reward",
                status=409,
            )
        self.posted = number

    # -------------------------------------------------------------------------- course

    async def course(self, launch: Launch, task: EpisodeTask, door: Door) -> float:
        """Let the agent run to its end; return the reward.

        Raises:
            EpisodeEnded: A limit of the policy has ended it, and it has no reward.
            AgentFailed: It failed, or has no reward where it has to name one.
        """
        running = asyncio.ensure_future(launch(task, door))
        try:
            await self._end_of(running)
            number = self._number(running)
        finally:
            self.is_over = True
            await _cancelled(running)
        if number is not None:
            return number
        if self.policy.end is not None:
            raise EpisodeEnded(self.policy.end)
        if self.reward == "grader":
            return 0.0
        raise AgentFailed(f"it has ended without a reward (reward: {self.reward})")

    async def _end_of(self, running: asyncio.Future[float | None]) -> None:
        """Wait for the end of an agent, but not long after that of its episode."""
        refused = asyncio.create_task(self._was_refused.wait())
        first: set[asyncio.Future[Any]] = {running, refused}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            refused.cancel()
        until_s = self.policy.clock.now() + _AFTER_END_S
        while not running.done():
            left_s = until_s - self.policy.clock.now()
            has_insisted = self._num_refusals > _MOST_REFUSALS
            if left_s <= 0 or has_insisted or self.policy.failure is not None:
                return
            await asyncio.wait({running}, timeout=min(left_s, 0.1))

    def _number(self, running: asyncio.Future[float | None]) -> float | None:
        """Return the reward that an agent has named."""
        number: float | None = None
        if running.done():
            try:
                number = running.result()
            except Exception:
                # Agents raise errors of their own about those that they are told.
                if self._last_limit is not None:
                    self.policy.over(self._last_limit)
                if self.policy.end is None and self.policy.failure is None:
                    raise
        return self.posted if number is None else number

    async def close(self) -> None:
        """End all calls; nothing is sampled any more."""
        self.is_over = True
        tasks = [answer.reply for answer in self._answers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.policy.settle()


def _num_leading(messages: Sequence[Message]) -> int:
    """Return how many messages at the beginning instruct the policy."""
    for number, message in enumerate(messages):
        if message["role"] not in _LEADING:
            return number
    return len(messages)


async def _cancelled(task: asyncio.Future[float | None]) -> None:
    """Cancel a task, and wait until it has cleaned up."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
