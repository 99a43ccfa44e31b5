"""The session of an agent: what its requests ask of the policy, and how it ends.

Invariant: a request is sampled once. One that comes again, since its client waited no
longer or lost the answer, is answered from the record. Nothing is requested of the
policy for an agent whose episode is over. What it requested before is sampled to its
end if the agent has ended by itself, so that chance does not decide which are rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from verl_ray.agents.gateway.echoes import Digest, Echoes
from verl_ray.agents.gateway.launch import Door, Launch
from verl_ray.agents.gateway.streams import Growth
from verl_ray.agents.policy import EpisodePolicy, NoPlace
from verl_ray.agents.returned import number_of
from verl_ray.agents.template import TextTooLong
from verl_ray.agents.transcript import SampledTurn
from verl_ray.errors import AgentFailed, CallRefused, DataError

HIDDEN = "(the key of the episode)"
"""What stands for a secret that an agent has printed."""

_AFTER_END_S = 10.0
"""Seconds that an agent may take once it was told that its episode is over."""

_REST_S = 1.0
"""Seconds before the end of an episode that are left to count the agent's score."""

_LOOK_S = 1.0
"""How often it is asked whether an agent is silent for too long."""

_MOST_REFUSALS = 100
"""Calls after the end for which an agent is stopped before."""


@dataclass(eq=False)
class Answer:
    """An answer of the record.

    Attributes:
        reply: The task that makes it.
        growth: What is known of it before; of one that is streamed alone.
        turns: Its turns, once they are sampled.
        was_delivered: Whether a client has all of it.
        num_waiting: Requests that wait for it.
    """

    reply: asyncio.Task[CallReply]
    growth: Growth
    turns: list[SampledTurn]
    was_delivered: bool = False
    num_waiting: int = 0

    def forget_parts(self) -> None:
        """Forget the parts of an answer that is whole, and that nobody receives."""
        if self.reply.done() and not self.num_waiting:
            self.growth.parts.clear()


@dataclass(frozen=True)
class _Link:
    """An answer that a later request may name.

    Attributes:
        digest: Digest of the conversation that it answers.
        num_instructions: Messages of that which hold for its own request alone.
        answer: The answer, as the agent was told it.
    """

    digest: Digest
    num_instructions: int
    answer: Message


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
    _answers: dict[bytes, list[Answer]] = field(default_factory=dict)
    """Answers to each request, the oldest first."""
    _links: dict[str, _Link] = field(default_factory=dict)
    _has_ended: bool = False
    _silent_since_s: float = 0.0
    _num_broken: int = 0
    _num_noted: Counter[str] = field(default_factory=Counter)
    """Requests that name what has no effect, by the metric that counts them."""
    _num_refusals: int = 0
    _was_refused: asyncio.Event = field(default_factory=asyncio.Event)
    _last_limit: End | None = None
    """The limit that the agent's last answer was about; None if it was about none."""

    # --------------------------------------------------------------------------- calls

    @contextlib.contextmanager
    def answer(
        self, protocol: Protocol, call: ModelCall, body: bytes, *, is_retry: bool
    ) -> Iterator[Answer]:
        """Yield the answer to a request, which is sampled unless it is known.

        The block waits for it and delivers it.

        Args:
            body: The request as it came.
            is_retry: Whether its client says that it asks again.
        """
        name = type(protocol).__name__.encode()
        key = hashlib.blake2b(name + body, digest_size=16).digest()
        answers = self._answers.setdefault(key, [])
        answer = _answer_again(answers, is_retry)
        if answer is None:
            turns: list[SampledTurn] = []
            growth = Growth(self._begun())
            reply = asyncio.create_task(self._reply(protocol, call, growth, turns))
            answer = Answer(reply, growth, turns)
            answers.append(answer)
            made = answer

            def end(task: asyncio.Task[CallReply]) -> None:
                self._silent_since_s = self.policy.clock.now()
                made.forget_parts()
                # Whatever was refused may be asked again.
                if task.cancelled() or task.exception() is not None:
                    answers.remove(made)

            reply.add_done_callback(end)
        answer.num_waiting += 1
        try:
            yield answer
        finally:
            answer.num_waiting -= 1
            answer.forget_parts()
            self._silent_since_s = self.policy.clock.now()

    def _begun(self) -> CallReply:
        return CallReply(
            number=uuid.uuid4().hex,
            model=self.policy.terms.model,
            created=int(time.time()),
            num_prompt_tokens=0,
            choices=(),
        )

    async def _reply(
        self,
        protocol: Protocol,
        call: ModelCall,
        growth: Growth,
        turns: list[SampledTurn],
    ) -> CallReply:
        """Return the answer to a call, whose turns are added to a list.

        Args:
            growth: What is told of the turns while they are sampled, for a stream.
        """
        self._check_terms(call)
        self._note_terms(call)
        recalled = self._echoes.recall(self._conversation(call))

        async def turn(number: int) -> tuple[SampledTurn, int]:
            return await self.policy.answer(
                recalled.own,
                call.tools,
                stop=call.stop,
                max_tokens=call.max_tokens,
                constraint=call.constraint,
                listened=partial(growth.listener, number) if call.is_stream else None,
            )

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(turn(number))
                    for number in range(call.num_choices)
                ]
        except BaseExceptionGroup as errors:
            raise self._refusal(errors.exceptions[0]) from None
        turns += [task.result()[0] for task in tasks]
        is_cut = any(each.sampled.action.finish == "length" for each in turns)
        self._last_limit = (self.policy.cut or End.MAX_TOKENS) if is_cut else None
        self._num_refusals = 0
        choices = [self._choice(call, each.sampled) for each in turns]
        answers = [served(choice, call.stop) for choice in choices]
        for number, (choice, answer) in enumerate(zip(choices, answers, strict=True)):
            own = message_of(choice.sampled.action)
            self._echoes.record(recalled, answer, own)
            shown = growth.as_shown(number, answer)
            if shown != answer:
                self._echoes.record(recalled, shown, own)
                self._count_broken()

        num_prompt_tokens = tasks[0].result()[1]
        reply = replace(
            growth.begun, num_prompt_tokens=num_prompt_tokens, choices=choices
        )
        link = _Link(recalled.digest, call.num_instructions, answers[0])
        self._links[protocol.response_id(reply)] = link
        return reply

    def _count_broken(self) -> None:
        """Count a turn of which what was streamed is not the beginning."""
        self._num_broken += 1
        self.policy.record(broken_streams=float(self._num_broken))
        self.policy.tell(
            "a streamed turn has shown words with which the whole turn does not begin,"
            " and what follows them was not sent: it ends a thought that nothing has"
            " begun, or vLLM's parser (agent.tool_parser) streams words that it leaves"
            " out in the end; episode/world/broken_streams counts such turns"
        )

    def num_tokens(self, call: ModelCall) -> int:
        """Return how many tokens the prompt of a call has."""
        try:
            recalled = self._echoes.recall(self._conversation(call))
            return self.policy.num_prompt_tokens(recalled.own, call.tools)
        except Exception as error:
            raise self._refusal(error) from None

    def _conversation(self, call: ModelCall) -> list[Message]:
        """Return all messages of a call, those of the answer that it names included."""
        if call.previous is None:
            return list(call.messages)
        link = self._links.get(call.previous)
        if link is None:
            raise CallRefused(
                f"no answer of this episode has the id {call.previous!r}",
                "previous_response_id",
                status=404,
            )
        # What instructed the policy then does so no longer.
        earlier = self._echoes.conversation(link.digest)[link.num_instructions :]
        instructions = call.messages[: call.num_instructions]
        further = call.messages[call.num_instructions :]
        # Only here the results are beside their calls.
        return in_order([*instructions, *earlier, link.answer, *further])

    def _check_terms(self, call: ModelCall) -> None:
        """Refuse what no policy is trained by."""
        terms = self.policy.terms
        if call.tools and not terms.reads_tools:
            raise CallRefused(
                "no call of a tool would be read: agent.tool_parser is null; set it to"
                " the name of vLLM's parser of the model's format, such as hermes",
                "tools",
            )
        most = self.policy.num_turns_left
        if call.num_choices > most > 0:
            raise CallRefused(
                f"n: {call.num_choices} turns are requested, and the episode may have"
                f" {most} more (agent.max_turns)",
                "n",
            )
        if call.constraint is not None and terms.trains:
            raise CallRefused(
                "what constrains the tokens (response_format, text.format, a required"
                " tool) is served in evaluations only: a constrained turn is not the"
                " policy's, and this episode is learned from; ask for it in the prompt,"
                " and leave the choice of tools to the policy (tool_choice: auto)"
            )

    def _note_terms(self, call: ModelCall) -> None:
        """Count and say what a call names and the run, or the policy, decides."""
        terms = self.policy.terms
        own = {
            "temperature": terms.temperature,
            "top_p": terms.top_p,
            "top_k": terms.top_k,
        }
        others = [
            name for name, value in call.sampling.items() if own.get(name) != value
        ]
        section = "rollout" if terms.trains else "evaluation"
        keys = ", ".join(f"{section}.{name}" for name in own)
        rule = f"the run's own sampling and seeds hold ({keys})"
        self._note("other_sampling", others, rule)
        rule = "it has no effect: how a model thinks and writes is the policy's own"
        self._note("without_effect", call.unheeded, rule)

    def _note(self, metric: str, names: Collection[str], rule: str) -> None:
        """Count a request that names what has no effect, and say why."""
        if not names:
            return
        self._num_noted[metric] += 1
        self.policy.record(**{metric: float(self._num_noted[metric])})
        # A text for each name, as each text is said once, and only so many are.
        for name in sorted(names):
            self.policy.tell(
                f"an agent asks for {name}; {rule}, and episode/world/{metric} counts"
                " such requests"
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
            self._num_refusals += 1
            if self._num_refusals > _MOST_REFUSALS:
                self.policy.over(End.CONTEXT_OVERFLOW)
                self._was_refused.set()
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

    def note_refusal(self, refusal: CallRefused) -> None:
        """Remember why a request was refused, in case the agent ends by that."""
        policy = self.policy
        if refusal.code == "context_length_exceeded":
            self._last_limit = End.CONTEXT_OVERFLOW
        if not policy.num_turns and not policy.overflow:
            policy.overflow = f"a request was refused: {refusal.message}"

    # -------------------------------------------------------------------------- reward

    def post(self, value: object) -> None:
        """Take the reward that the agent posts.

        Raises:
            CallRefused: It is no finite number, another one was posted before, or the
                reward comes from elsewhere.
        """
        if self.reward != "post":
            why = f"(reward: {self.reward}); set reward: post beside its command"
            if self.reward == "function":
                why = "but returned by its function"
            raise CallRefused(f"the reward of this agent is not posted {why}")
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
        self._silent_since_s = self.policy.clock.now()
        running = asyncio.ensure_future(launch(task, door))
        try:
            await self._end_of(running)
            number = self._number(running)
            if running.done():
                await self._end_of_turns()
            self._has_ended = True
        except AgentFailed as failure:
            self._has_ended = True
            raise AgentFailed(str(failure).replace(door.api_key, HIDDEN)) from None
        finally:
            self.is_over = True
            await _cancelled(running)
        if number is not None:
            return number
        if self.policy.end is not None:
            raise EpisodeEnded(self.policy.end)
        if self.reward in ("grader", "function"):
            return 0.0
        raise AgentFailed(f"it has ended without a reward (reward: {self.reward})")

    async def _end_of(self, running: asyncio.Future[float | None]) -> None:
        """Wait for the end of an agent, but not long after that of its episode."""
        refused = asyncio.create_task(self._was_refused.wait())
        events: set[asyncio.Future[Any]] = {running, refused}
        try:
            # Ends with one of them, or once the agent has been silent for too long.
            while not (running.done() or refused.done() or self._is_silent()):
                await asyncio.wait(
                    events, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            refused.cancel()
        if self._is_silent() and not running.done():
            raise self.policy.over(End.TURN_TIMEOUT)
        until_s = self.policy.clock.now() + _AFTER_END_S
        while not running.done():
            left_s = until_s - self.policy.clock.now()
            has_insisted = self._num_refusals > _MOST_REFUSALS
            if left_s <= 0 or has_insisted or self.policy.failure is not None:
                return
            await asyncio.wait({running}, timeout=min(left_s, 0.1))

    async def _end_of_turns(self) -> None:
        """Wait for what an agent has requested that has ended meanwhile.

        It may have left a stream as soon as that said what to do.
        """
        self.is_over = True
        replies = [answer.reply for answer in self._all_answers()]
        if replies:
            until_s = self.policy.deadline_s - _REST_S
            ends = asyncio.gather(*replies, return_exceptions=True)
            await self.policy.clock.wait(ends, until_s)

    def _all_answers(self) -> list[Answer]:
        return [each for answers in self._answers.values() for each in answers]

    def _is_silent(self) -> bool:
        """Return whether the agent has asked nothing for longer than it may.

        One that does not read an answer, which is whole, says nothing either.
        """
        answers = self._all_answers()
        is_waiting = any(each.num_waiting and not each.reply.done() for each in answers)
        silent_s = self.policy.clock.now() - self._silent_since_s
        return not is_waiting and silent_s > self.policy.limits.turn_s

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
        answers = self._all_answers()
        for answer in answers:
            answer.reply.cancel()
        tasks = [answer.reply for answer in answers]
        await asyncio.gather(*tasks, return_exceptions=True)
        unread = [each for each in answers if not each.was_delivered]
        self.policy.settle([turn for answer in unread for turn in answer.turns])
        # One that was stopped may have said before what it is worth.
        if self.posted is not None and not self._has_ended:
            self.policy.pay(self.posted)


def _answer_again(answers: Sequence[Answer], is_retry: bool) -> Answer | None:
    """Return the answer for a request that may be a repetition; None for a new one.

    One that nobody waits for, and nobody has, belongs to a client that has gone.

    Args:
        answers: The answers to the same request, the oldest first.
        is_retry: Whether its client says that it asks again.
    """
    lost = [each for each in answers if not (each.was_delivered or each.num_waiting)]
    if lost:
        return lost[0]
    undelivered = [each for each in answers if not each.was_delivered]
    return (undelivered or answers)[-1] if is_retry and answers else None


async def _cancelled(task: asyncio.Future[float | None]) -> None:
    """Cancel a task, and wait until it has cleaned up."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
