"""The HTTP server at which the agents of a process of episodes ask the policy.

POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens and
/v1/reward, GET /v1/models. The secret of an episode, as bearer token or as x-api-key,
is its session.

Invariant: it listens on loopback alone. Without the secret of an open episode nothing
is read but the head of a request, and no secret stands in an answer or a log. Whatever
an agent sends, or does not read, other agents go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import resource
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from verl_ray.agents.contract import EpisodeTask, Policy
from verl_ray.agents.episode import Run
from verl_ray.agents.gateway.calls import ModelCall, Protocol
from verl_ray.agents.gateway.chat import ChatProtocol
from verl_ray.agents.gateway.launch import Agent, Door
from verl_ray.agents.gateway.messages import MessagesProtocol
from verl_ray.agents.gateway.responses import ResponsesProtocol
from verl_ray.agents.gateway.session import HIDDEN, AgentSession, Answer
from verl_ray.agents.policy import EpisodePolicy
from verl_ray.errors import CallRefused

HOST = "127.0.0.1"

_MOST_BODY_BYTES = 1 << 24
_LARGE_BYTES = 1 << 18
"""Bytes from which on a body is read in a thread: it would hold the event loop."""

_MOST_CALLS = 64
"""Requests of an episode that are worked on at a time; others wait."""

_MOST_WAITING = 1024
"""Requests of an episode that may wait; further ones are refused."""

_FIRST_SIGN_S = 10.0
"""Seconds after which a stream without an event shows that it is alive."""

_SHUTDOWN_S = 0.1


_CHAT, _RESPONSES, _MESSAGES = ChatProtocol(), ResponsesProtocol(), MessagesProtocol()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class _Guest:
    """An agent's session, with what bounds its requests."""

    session: AgentSession
    secret: str
    places: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_MOST_CALLS)
    )
    num_requests: int = 0
    handlers: set[asyncio.Task[Any]] = field(default_factory=set)


Served = Callable[[web.Request, _Guest], Awaitable[web.StreamResponse]]


class Gateway:
    """The server of this event loop; see `gateway_here`."""

    def __init__(self) -> None:
        """Listen to nobody yet."""
        # By a digest of the secret, so that no look-up tells how much of it is right.
        self._guests: dict[bytes, _Guest] = {}
        application = web.Application(
            client_max_size=_MOST_BODY_BYTES, middlewares=[_with_errors]
        )
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
            application,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._port = 0

    async def listen(self) -> None:
        """Listen on a free port of loopback."""
        # Agents have connections, and so do the pipes of their processes.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0, backlog=1024).start()
        self._port = int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def guest(
        self, policy: EpisodePolicy, reward: str
    ) -> AsyncIterator[tuple[AgentSession, Door]]:
        """Open the session of an episode, with its secret, for the time of a block."""
        secret = f"sk-{secrets.token_urlsafe(32)}"
        guest = _Guest(AgentSession(policy, reward), secret)
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

    # --------------------------------------------------------------------------- routes

    def _served(self, handler: Served) -> Handler:
        """Return a handler of requests that have the secret of an open episode."""

        async def handle(request: web.Request) -> web.StreamResponse:
            guest = self._guest_of(request)
            async with _counted(guest):
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
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}"
        refusal = CallRefused(text, status=error.status)
    except CallRefused as error:
        refusal = error
    except ConnectionError:
        raise
    except Exception as error:
        traceback.print_exception(error)
        refusal = CallRefused(f"the turn was not sampled: {error}", status=500)
    protocol = _MESSAGES if request.path.startswith("/v1/messages") else _CHAT
    response = web.json_response(protocol.error(refusal), status=refusal.status)
    if not request.content.is_eof():
        # What else it sends is not read.
        response.force_close()
    return response


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
    fields, _ = await _read(request)
    if set(fields) != {"reward"}:
        raise CallRefused('expected {"reward": NUMBER}', "reward")
    guest.session.post(fields["reward"])
    return web.json_response({})


async def _count_tokens(request: web.Request, guest: _Guest) -> web.StreamResponse:
    fields, _ = await _read(request)
    num_tokens = guest.session.num_tokens(_MESSAGES.read_count(fields))
    return web.json_response(_MESSAGES.count(num_tokens))


def _calls(protocol: Protocol) -> Served:
    """Return what serves the calls of a protocol."""

    async def serve(request: web.Request, guest: _Guest) -> web.StreamResponse:
        fields, body = await _read(request)
        call = protocol.read(fields)
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
    """Send an answer as events.

    It begins with the status as long as the turn takes no time, and then with comments,
    which clients skip.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    # Ends with the turn, or its refusal.
    while not answer.reply.done():
        await asyncio.wait({answer.reply}, timeout=_FIRST_SIGN_S)
        if not answer.reply.done():
            if not response.prepared:
                await response.prepare(request)
            await response.write(b": the policy is being sampled\n\n")
    try:
        reply = await asyncio.shield(answer.reply)
    except CallRefused as refusal:
        if not response.prepared:
            raise
        await response.write(_event("error", protocol.error(refusal)))
        await response.write_eof()
        return response

    if not response.prepared:
        await response.prepare(request)
    for name, data in protocol.events(call, reply):
        await response.write(_event(name, data))
    await response.write_eof()
    answer.was_delivered = True
    return response


def _event(name: str | None, data: Mapping[str, Any] | str) -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


async def _read(request: web.Request) -> tuple[dict[str, Any], bytes]:
    """Return the JSON object in the body of a request, and the body.

    Raises:
        CallRefused: It is too long, or none.
    """
    if (request.content_length or 0) > _MOST_BODY_BYTES:
        raise CallRefused(
            f"the body has {request.content_length} bytes, and may have"
            f" {_MOST_BODY_BYTES}",
            status=413,
        )
    body = await request.read()
    try:
        if len(body) > _LARGE_BYTES:
            fields = await asyncio.to_thread(json.loads, body)
        else:
            fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CallRefused("the body is no JSON object")
    return fields, body


@contextlib.asynccontextmanager
async def _counted(guest: _Guest) -> AsyncIterator[None]:
    """Let a request of a session wait for its place.

    Raises:
        CallRefused: Too many wait, or the episode is over.
    """
    if guest.num_requests > _MOST_WAITING:
        raise CallRefused("too many requests of this episode wait", status=429)
    guest.num_requests += 1
    task = asyncio.current_task()
    assert task is not None
    guest.handlers.add(task)
    try:
        async with guest.places:
            if guest.session.is_over:
                raise CallRefused("the episode is over", status=403)
            yield
    finally:
        guest.num_requests -= 1
        guest.handlers.discard(task)


def _key(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


# ------------------------------------------------------------- the server of this loop

_gateways: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Gateway]] = (
    WeakKeyDictionary()
)


async def gateway_here() -> Gateway:
    """Return the gateway of the running event loop, which the first call starts."""

    async def start() -> Gateway:
        gateway = Gateway()
        await gateway.listen()
        return gateway

    loop = asyncio.get_running_loop()
    if loop not in _gateways:
        _gateways[loop] = asyncio.create_task(start())
    return await asyncio.shield(_gateways[loop])


def run_of(agent: Agent) -> Run:
    """Return an agent as a coroutine function, which is how an episode runs it."""

    async def run(task: EpisodeTask, policy: Policy) -> float:
        assert isinstance(policy, EpisodePolicy), "an episode gives its own"
        gateway = await gateway_here()
        launch = agent.launch
        async with gateway.guest(policy, launch.reward) as (session, door):
            return await session.course(launch, task, door)

    return run
