"""The HTTP server at which the agents of a process of episodes ask the policy.

POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens and
/v1/reward, GET /v1/models. The secret of an episode, as bearer token or as x-api-key,
is its session.

Invariant: it listens on loopback alone. Without the secret of an open episode nothing
is read but the head of a request, and no secret stands in an answer or a log. Whatever
an agent sends, or does not read, other agents go on: what is read of it is bounded by
what the policy's context can hold, before any of it is made into values.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from verl_ray.agents.contract import EpisodeTask, Policy
from verl_ray.agents.episode import Run
from verl_ray.agents.gateway.calls import AnswerStream, Event, ModelCall, Protocol
from verl_ray.agents.gateway.chat import ChatProtocol
from verl_ray.agents.gateway.connections import Connection, Connections
from verl_ray.agents.gateway.launch import Agent, Door
from verl_ray.agents.gateway.messages import MessagesProtocol
from verl_ray.agents.gateway.responses import ResponsesProtocol
from verl_ray.agents.gateway.session import HIDDEN, AgentSession, Answer
from verl_ray.agents.loop_watch import AGENT_REMEDY, remedy
from verl_ray.agents.policy import EpisodePolicy
from verl_ray.errors import CallRefused

HOST = "127.0.0.1"

_MOST_BODY_BYTES = 1 << 24
_LEAST_BODY_BYTES = 1 << 16
_BYTES_OF_A_TOKEN = 64

_MOST_MARKS = 1 << 19
_LEAST_MARKS = 1 << 12
_MARKS_OF_A_TOKEN = 2

_MOST_MESSAGES = 10_000
"""Messages, calls and tools of a request; each costs time, whatever the context is."""

_SMALL_BYTES = 1 << 12
"""Bytes of a body that is read at once; others are read in turn, in a thread."""

_MOST_CALLS = 64
"""Requests of an episode that are worked on at a time; others wait."""

_FIRST_SIGN_S = 10.0
"""Seconds after which a stream without an event shows that it is alive."""

_SHUTDOWN_S = 0.1


_CHAT, _RESPONSES, _MESSAGES = ChatProtocol(), ResponsesProtocol(), MessagesProtocol()

_T = TypeVar("_T")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class _Guest:
    """An agent's session, with what bounds its requests."""

    session: AgentSession
    secret: str
    readers: ThreadPoolExecutor
    places: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_MOST_CALLS)
    )
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    handlers: set[asyncio.Task[Any]] = field(default_factory=set)


Served = Callable[[web.Request, _Guest], Awaitable[web.StreamResponse]]


class Gateway:
    """The server of this event loop; see `gateway_here`."""

    def __init__(self) -> None:
        """Listen to nobody yet."""
        # By a digest of the secret, so that no look-up tells how much of it is right.
        self._guests: dict[bytes, _Guest] = {}
        self._connections = Connections()
        self._readers = ThreadPoolExecutor(2, "gateway")
        application = web.Application(middlewares=[_with_errors])
        application.add_routes(
            [
                web.get("/v1/models", self._served(_models)),
                web.post("/v1/chat/completions", self._served(_calls(_CHAT))),
                web.post("/v1/responses", self._served(_calls(_RESPONSES))),
                web.post("/v1/messages", self._served(_calls(_MESSAGES))),
                web.post("/v1/messages/count_tokens", self._served(_count_tokens)),
                web.post("/v1/reward", self._served(_reward)),
                web.post("/reward", self._served(_reward)),
            ]
        )
        # A client that goes away may come back for its answer, which is sampled anyhow.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
        )
        self._listener: asyncio.Server | None = None
        self._port = 0

    async def listen(self) -> None:
        """Listen on a free port of loopback."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "it is set up"
        self._listener = await self._connections.listen(server, HOST)
        self._port = int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        self._readers.shutdown(wait=False)

    @contextlib.asynccontextmanager
    async def guest(
        self, policy: EpisodePolicy, reward: str
    ) -> AsyncIterator[tuple[AgentSession, Door]]:
        """Open the session of an episode, with its secret, for the time of a block."""
        secret = f"sk-{secrets.token_urlsafe(32)}"
        guest = _Guest(AgentSession(policy, reward), secret, self._readers)
        self._guests[_key(secret)] = guest

        def keep_output(text: str) -> None:
            policy.output = text.replace(secret, HIDDEN)

        url = f"http://{HOST}:{self._port}"
        try:
            yield guest.session, Door(f"{url}/v1", url, secret, keep_output)
        finally:
            del self._guests[_key(secret)]
            await guest.session.close()
            # Who does not read an answer is cut off.
            for task in guest.handlers:
                task.cancel()
            await asyncio.gather(*guest.handlers, return_exceptions=True)
            self._connections.close_all(guest)

    # --------------------------------------------------------------------------- routes

    def _served(self, handler: Served) -> Handler:
        """Return a handler of requests that have the secret of an open episode."""

        async def handle(request: web.Request) -> web.StreamResponse:
            guest = self._guest_of(request)
            assert isinstance(request.protocol, Connection), "it listens for these"
            self._connections.claim(request.protocol, guest)
            async with _place(guest):
                try:
                    return await handler(request, guest)
                except CallRefused as refusal:
                    guest.session.note_refusal(refusal)
                    raise

        return handle

    def _guest_of(self, request: web.Request) -> _Guest:
        """Return the session whose secret a request has.

        Raises:
            CallRefused: There is none.
        """
        bearer = request.headers.get("Authorization", "")
        scheme, _, token = bearer.partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        secret = token or request.headers.get("x-api-key", "")
        guest = self._guests.get(_key(secret))
        if guest is None or not hmac.compare_digest(
            guest.secret.encode(), secret.encode(errors="replace")
        ):
            raise CallRefused(
                "no open episode has this key: each has a key of its own, in"
                " OPENAI_API_KEY and ANTHROPIC_API_KEY, until it ends",
                status=401,
                code="invalid_api_key",
            )
        return guest


@web.middleware
async def _with_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write refusals in the form of the protocol that a request has."""
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as error:
        refusal = _refusal(request, error)
    protocol = _MESSAGES if request.path.startswith("/v1/messages") else _CHAT
    response = web.json_response(protocol.error(refusal), status=refusal.status)
    if refusal.status == 429:
        # What is asked again by the client itself counts as known, and this is not.
        response.headers["x-should-retry"] = "false"
    if refusal.status == 429 or not request.content.is_eof():
        # What else it sends is not read.
        response.force_close()
    return response


def _refusal(request: web.Request, error: Exception) -> CallRefused:
    """Return what a client is told of an error."""
    if isinstance(error, CallRefused):
        return error
    if isinstance(error, web.HTTPException):
        text = f"{request.method} {request.path}: {error.reason}"
        return CallRefused(text, status=error.status)
    traceback.print_exception(error)
    return CallRefused(f"the turn was not sampled: {error}", status=500)


async def _models(request: web.Request, guest: _Guest) -> web.StreamResponse:
    policy = guest.session.policy
    model = {
        "id": policy.terms.model,
        "object": "model",
        "type": "model",
        "display_name": policy.terms.model,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "verl_ray",
        "max_model_len": policy.limits.context_tokens,
    }
    lists = {"first_id": model["id"], "last_id": model["id"], "has_more": False}
    return web.json_response({"object": "list", "data": [model], **lists})


async def _reward(request: web.Request, guest: _Guest) -> web.StreamResponse:
    fields, _ = await _read(request, guest, dict)
    if set(fields) != {"reward"}:
        raise CallRefused('expected {"reward": NUMBER}', "reward")
    guest.session.post(fields["reward"])
    return web.json_response({})


async def _count_tokens(request: web.Request, guest: _Guest) -> web.StreamResponse:
    call, _ = await _read(request, guest, _MESSAGES.read_count)
    _check_length(call, guest)
    num_tokens = guest.session.num_tokens(call)
    return web.json_response(_MESSAGES.count(num_tokens))


def _calls(protocol: Protocol) -> Served:
    """Return what serves the calls of a protocol."""

    async def serve(request: web.Request, guest: _Guest) -> web.StreamResponse:
        call, body = await _read(request, guest, protocol.read)
        _check_length(call, guest)
        retries = request.headers.get("x-stainless-retry-count", "0")
        is_retry = retries != "0"
        with guest.session.answer(protocol, call, body, is_retry=is_retry) as answer:
            if call.is_stream:
                return await _stream(request, protocol, call, answer)
            reply = await asyncio.shield(answer.reply)
            response = web.json_response(protocol.whole(call, reply))
            await response.prepare(request)
            await response.write_eof()
            answer.was_delivered = True
            return response

    return serve


async def _stream(
    request: web.Request, protocol: Protocol, call: ModelCall, answer: Answer
) -> web.StreamResponse:
    """Send an answer as events, while it is sampled.

    It begins with the status as long as nothing is known of it, and comments, which
    clients skip, show that it goes on.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    growth = answer.growth
    stream: AnswerStream | None = None
    num_sent = 0
    # Ends with the answer, or its refusal, and after what was told of it before.
    while not answer.reply.done() or (stream and len(growth.parts) > num_sent):
        parts = growth.after(num_sent)
        num_sent = len(growth.parts)
        text = b"" if parts else await _next_sign(answer)
        if parts and stream is None:
            stream = protocol.stream(call, growth.begun)
            text += _written(stream.begin())
        for part in parts:
            assert stream is not None, "it was made for the first of them"
            text += _written(stream.grow(*part))
        if text:
            if not response.prepared:
                await response.prepare(request)
            await response.write(text)
    try:
        reply = await asyncio.shield(answer.reply)
    except Exception as error:
        if not response.prepared:
            raise
        refusal = _refusal(request, error)
        await response.write(_event("error", protocol.error(refusal)))
        await response.write_eof()
        return response

    text = b""
    if stream is None:
        stream = protocol.stream(call, growth.begun)
        text += _written(stream.begin())
    text += _written(stream.end(reply))
    if not response.prepared:
        await response.prepare(request)
    await response.write(text)
    await response.write_eof()
    answer.was_delivered = True
    return response


async def _next_sign(answer: Answer) -> bytes:
    """Wait for more of an answer; return a comment if none comes for a while."""
    events: set[asyncio.Future[Any]] = {answer.reply, answer.growth.news}
    done, _ = await asyncio.wait(
        events, timeout=_FIRST_SIGN_S, return_when=asyncio.FIRST_COMPLETED
    )
    return b"" if done else b": the policy is being sampled\n\n"


def _written(events: Iterator[Event]) -> bytes:
    """Return server-sent events."""
    return b"".join(_event(name, data) for name, data in events)


def _event(name: str | None, data: Mapping[str, Any] | str) -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


# --------------------------------------------------------------------------- bodies


async def _read(
    request: web.Request, guest: _Guest, read: Callable[[Mapping[str, Any]], _T]
) -> tuple[_T, bytes]:
    """Return what is read of the JSON object in the body of a request, and the body.

    Raises:
        CallRefused: It is too long, or no such object, or refused by `read`.
    """
    tokens = guest.session.policy.limits.context_tokens
    most = min(_MOST_BODY_BYTES, _LEAST_BODY_BYTES + _BYTES_OF_A_TOKEN * tokens)
    size = request.content_length
    if size is not None and size > most:
        raise _too_long(f"the body has {size} bytes", most, tokens)

    if size is not None and size <= _SMALL_BYTES:
        body = await _bytes(request, most, tokens)
        return read(_fields(body, tokens)), body
    # One at a time of a session, so that it takes neither all memory nor all time.
    async with guest.reading:
        body = await _bytes(request, most, tokens)
        done = asyncio.get_running_loop().run_in_executor(
            guest.readers, lambda: read(_fields(body, tokens))
        )
        try:
            return await asyncio.shield(done), body
        finally:
            # Whoever goes away meanwhile does not have the next one read as well.
            await asyncio.wait({done})


async def _bytes(request: web.Request, most: int, tokens: int) -> bytes:
    """Return the body of a request, of which no more than `most` bytes are taken."""
    body = bytearray()
    try:
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > most:
                raise _too_long(f"the body has more than {most} bytes", most, tokens)
    except web.RequestPayloadError as error:
        raise CallRefused(f"the body cannot be read: {error}") from None
    return bytes(body)


def _fields(body: bytes, tokens: int) -> dict[str, Any]:
    """Return the JSON object in a body, for a context of so many tokens.

    Raises:
        CallRefused: It is none, or has too many values.
    """
    # Each value has one of these marks before it, save the first of a body.
    marks = body.count(b",") + body.count(b"{") + body.count(b"[")
    most = min(_MOST_MARKS, _LEAST_MARKS + _MARKS_OF_A_TOKEN * tokens)
    if marks > most:
        raise _too_long(f"the body has {marks} commas and brackets", most, tokens)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CallRefused("the body is no JSON object")
    return fields


def _check_length(call: ModelCall, guest: _Guest) -> None:
    """Refuse a call whose messages, calls and tools cannot all have a place."""
    tokens = guest.session.policy.limits.context_tokens
    calls = sum(len(each.get("tool_calls", ())) for each in call.messages)
    count = len(call.messages) + calls + len(call.tools)
    most = min(_MOST_MESSAGES, tokens)
    if count > most:
        what = f"there are {count} messages, calls and tools"
        raise _too_long(what, most, tokens)


def _too_long(what: str, most: int, tokens: int) -> CallRefused:
    text = f"{what}, and for a context of {tokens} tokens there may be {most}"
    return CallRefused(text, status=413, code="context_length_exceeded")


@contextlib.asynccontextmanager
async def _place(guest: _Guest) -> AsyncIterator[None]:
    """Let a request of a session wait for its place.

    Raises:
        CallRefused: The episode is over.
    """
    task = asyncio.current_task()
    assert task is not None
    guest.handlers.add(task)
    try:
        async with guest.places:
            if guest.session.is_over:
                raise CallRefused("the episode is over", status=403)
            yield
    finally:
        guest.handlers.discard(task)


def _key(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


# ------------------------------------------------------------- the server of this loop

_gateways: dict[asyncio.AbstractEventLoop, asyncio.Task[Gateway]] = {}


async def gateway_here() -> Gateway:
    """Return the gateway of the running event loop, which the first call starts.

    One that could not start is started again by the next call.
    """
    loop = asyncio.get_running_loop()
    if loop in _gateways:
        return await asyncio.shield(_gateways[loop])
    for other in [each for each in _gateways if each.is_closed()]:
        del _gateways[other]
    starting = _gateways[loop] = asyncio.create_task(_started())

    def forget_failure(task: asyncio.Task[Gateway]) -> None:
        if task.cancelled() or task.exception() is not None:
            del _gateways[loop]

    starting.add_done_callback(forget_failure)
    return await asyncio.shield(starting)


async def _started() -> Gateway:
    gateway = Gateway()
    try:
        await gateway.listen()
    except BaseException:
        await gateway.close()
        raise
    return gateway


def run_of(agent: Agent) -> Run:
    """Return an agent as a coroutine function, which is how an episode runs it."""

    async def run(task: EpisodeTask, policy: Policy) -> float:
        assert isinstance(policy, EpisodePolicy), "an episode gives its own"
        remedy.set(AGENT_REMEDY)
        gateway = await gateway_here()
        launch = agent.launch
        async with gateway.guest(policy, launch.reward) as (session, door):
            return await session.course(launch, task, door)

    return run
