"""OpenAI's API over HTTP for clients outside of the run, such as evaluation harnesses.

Invariant: no client can stop or change the run. Responses for clients have seeds of
their own, and at most `in_flight` of them are generated at a time. Sleep and weight
updates preempt them (`finish_reason` "abort", with the tokens that there are); calls
that come meanwhile get the status 503 and a time to retry. A client that disconnects
takes its requests with it. A replica that starts again does not need its port: it
generates rollouts, and the endpoint listens once the port is free.

GET /health, GET /v1/models, POST /v1/completions, POST /v1/chat/completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import psutil
from aiohttp import web

from verl_ray.columns.stages import Finish
from verl_ray.config.rollout import EndpointConfig
from verl_ray.data.tokenizers import TemplateArguments
from verl_ray.errors import CallRefused, CannotGenerate, ConfigError, Problem
from verl_ray.rollout.choices import Choice, ChoiceFactory, prompts_of
from verl_ray.rollout.openai_api import (
    FINISH_REASONS,
    ApiCall,
    ChatCall,
    ChoiceDelta,
    CompletionCall,
    ReplyBuilder,
    error_body,
    read_call,
    usage_of,
)
from verl_ray.rollout.server import RolloutServer
from verl_ray.rollout.server_events import EventStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MOST_BODY_BYTES = 1 << 24
_RETRY_AFTER_S = "1"
_SHUTDOWN_S = 0.1
"""How long calls may go on after the endpoint was closed."""

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 60.0
"""Pauses between two attempts to listen. Each is twice as long as the one before."""

SendDelta = Callable[[Choice, ChoiceDelta], Awaitable[None]]


class Endpoint:
    """An HTTP server on its own thread, in front of a rollout server.

    Attributes:
        port: The port that it listens on; None while it waits for the port.
    """

    def __init__(
        self,
        server: RolloutServer,
        tokenizer: PreTrainedTokenizerBase,
        config: EndpointConfig,
        *,
        port: int,
        model: str,
        max_model_len: int,
        arguments: TemplateArguments | None = None,
        waits: bool = False,
    ) -> None:
        """Start the endpoint; it listens when this returns, unless it waits.

        Args:
            server: The rollout server that generates the responses.
            tokenizer: The policy's tokenizer.
            config: The endpoint's settings.
            port: Port to listen on; 0 = any free port.
            model: The policy's name for clients.
            max_model_len: Largest number of tokens of prompt and response together.
            arguments: Variables of the chat template, where a call has no others.
            waits: Whether an address that cannot be listened on now is tried again in
                the background, until the endpoint listens or is closed.

        Raises:
            ConfigError: The address cannot be listened on and the endpoint does not
                wait, or the environment has no token for clients.
        """
        self._server = server
        self._tokenizer = tokenizer
        self._model = model
        self._max_model_len = max_model_len
        end_tokens = server.run(lambda engine: engine.end_tokens)
        self._factory = ChoiceFactory(tokenizer, end_tokens, max_model_len, arguments)
        self._token = _client_token(config.token_env)

        # Only coroutines on the loop's thread use what is created here.
        self._slots = asyncio.Semaphore(config.in_flight)
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(
            self._application(),
            # A client that disconnects thereby cancels its call, and its requests.
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollout endpoint", daemon=True
        )
        self._closing = asyncio.Event()
        self._attempts: asyncio.Task[None] | None = None
        self._thread.start()
        self.port: int | None = None
        self._start_listening(config.host, port, config.port, waits=waits)

    def close(self) -> None:
        """End calls and stop listening. Calling it again has no effect."""
        if self._loop.is_closed():
            return

        asyncio.run_coroutine_threadsafe(self._clean_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _clean_up(self) -> None:
        self._closing.set()
        # An attempt under way ends first, so that it leaves no socket behind.
        if self._attempts is not None:
            await self._attempts
        await self._runner.cleanup()

    def _start_listening(
        self, host: str, port: int, configured_port: int, *, waits: bool
    ) -> None:
        start = self._listen_or_wait if waits else self._listen
        try:
            asyncio.run_coroutine_threadsafe(start(host, port), self._loop).result()
        except OSError as error:
            self.close()
            reason = error.strerror or error
            rule = f"a rollout server cannot listen on {host} port {port}: {reason}"
            fix = (
                "Give a port that is free, or 0 for any, and an address of the machine"
                " in rollout.endpoint.host."
            )
            key = "rollout.endpoint.port"
            raise ConfigError(
                [Problem(key, configured_port, rule, fix, may_pass=True)]
            ) from None

    async def _listen(self, host: str, port: int) -> None:
        # An attempt may have failed before.
        if self._runner.server is None:
            await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError:
            # The runner would keep a site that has not started.
            await site.stop()
            raise
        self.port = int(self._runner.addresses[0][1])

    async def _listen_or_wait(self, host: str, port: int) -> None:
        try:
            await self._listen(host, port)
        except OSError as error:
            attempts = self._keep_trying(host, port, error)
            self._attempts = asyncio.create_task(attempts)

    async def _keep_trying(self, host: str, port: int, error: OSError) -> None:
        """Try to listen until it succeeds or the endpoint is closed.

        Each pause that is longer than those before it is announced on stderr.

        Args:
            host: The address to listen on.
            port: The port to listen on.
            error: Why the first attempt failed.
        """
        pause_s, announced_s = _FIRST_PAUSE_S, 0.0
        while self.port is None:
            if pause_s > announced_s:
                # The search for the holder reads the files of every process. A log on
                # a full disk ends no attempts.
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(_warn_of_pause, host, port, error, pause_s)
                announced_s = pause_s
            if await self._is_closing_within(pause_s):
                return

            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                await self._listen(host, port)
            except OSError as next_error:
                error = next_error

    async def _is_closing_within(self, seconds: float) -> bool:
        """Wait for so long, or until the endpoint is closed; return whether it is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    # --------------------------------------------------------------------------- routes

    def _application(self) -> web.Application:
        application = web.Application(
            client_max_size=_MOST_BODY_BYTES, middlewares=[self._guard]
        )
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat_completions),
            ]
        )
        return application

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Check the client's token, and turn exceptions into OpenAI's error replies."""
        try:
            self._require_token(request)
            return await handler(request)
        except web.HTTPException as error:
            refusal = CallRefused(
                f"{request.method} {request.path}: {error.reason}", status=error.status
            )
            return _error_reply(refusal)
        except ConnectionError:
            # The client has disconnected, so nobody would read a reply.
            raise
        except Exception as error:
            return _error_reply(error)

    def _require_token(self, request: web.Request) -> None:
        if self._token is None or request.path == "/health":
            return

        sent = request.headers.get("Authorization", "").encode(errors="replace")
        expected = f"Bearer {self._token}".encode()
        # This comparison takes the same time wherever the two differ.
        if not hmac.compare_digest(sent, expected):
            raise CallRefused(
                "expected the right token in the header Authorization: Bearer TOKEN",
                status=401,
            )

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(dataclasses.asdict(self._server.health()))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "verl_ray",
            "max_model_len": self._max_model_len,
            "policy_version": self._server.health().policy_version,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._reply(request, CompletionCall)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._reply(request, ChatCall)

    # ---------------------------------------------------------------------------- calls

    async def _reply(
        self, request: web.Request, kind: type[ApiCall]
    ) -> web.StreamResponse:
        call = await self._read_call(request, kind)
        choices = self._factory.choices(call)
        head = {
            "id": f"{call.ID_PREFIX}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._model,
        }
        builder = ReplyBuilder(call, head, self._spell)

        if call.stream:
            return await self._stream(request, call, choices, builder)

        # Without a stream, the reply begins when all choices are finished.
        await self._generate_all(choices)
        wholes = [choice.whole() for choice in choices]
        _refuse_aborted(call, wholes)
        prompts = [choice.prompt for choice in choices]
        reply = builder.whole(wholes, prompts, _usage(call, choices))
        return web.json_response(reply)

    async def _read_call(self, request: web.Request, kind: type[ApiCall]) -> ApiCall:
        # A web page may not send this type to another site, so that no page can have
        # its visitor's browser make calls.
        if request.content_type != "application/json":
            raise CallRefused(
                "expected Content-Type: application/json, found"
                f" {request.content_type}",
                status=415,
            )

        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise CallRefused(f"the body is no JSON: {error}") from None

        call = read_call(kind, body)
        if call.model not in (None, self._model):
            raise CallRefused(
                f"model = {call.model!r}: this endpoint serves {self._model!r}",
                "model",
                status=404,
            )
        return call

    async def _stream(
        self,
        request: web.Request,
        call: ApiCall,
        choices: Sequence[Choice],
        builder: ReplyBuilder,
    ) -> web.StreamResponse:
        events = EventStream(request)

        async def send(choice: Choice, delta: ChoiceDelta) -> None:
            await events.send(builder.event(delta, choice.prompt))

        try:
            await self._generate_all(choices, send)
        except Exception as error:
            # Once the stream has begun, an error can only be reported as an event.
            if not events.has_begun or isinstance(error, ConnectionError):
                raise
            await events.send(error_body(error))
        else:
            if call.stream_options.include_usage:
                await events.send(builder.usage_event(_usage(call, choices)))
        return await events.end()

    async def _generate_all(
        self, choices: Sequence[Choice], send: SendDelta | None = None
    ) -> None:
        """Generate all choices concurrently; the first failure cancels the others.

        Args:
            choices: The choices, which collect what is generated for them.
            send: Sends each part of a choice as it comes.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._generate(choice, send))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _generate(self, choice: Choice, send: SendDelta | None) -> None:
        """Consume the chunks of a choice until it is finished.

        This waits for a free slot first, and then for the rollout server. A stop string
        may finish a choice before the engine does. Returning then closes the stream,
        which aborts the request.
        """
        async with (
            self._slots,
            aclosing(self._server.respond_async([choice.request])) as stream,
        ):
            async for chunks in stream:
                for chunk in chunks:
                    delta = choice.add(chunk)
                    if send is not None:
                        await send(choice, delta)
                    if delta.finish is not None:
                        return

    def _spell(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def _usage(call: ApiCall, choices: Sequence[Choice]) -> dict[str, int]:
    deltas = [delta for choice in choices for delta in choice.deltas]
    return usage_of(prompts_of(call, choices), deltas)


def _refuse_aborted(call: ApiCall, choices: Sequence[ChoiceDelta]) -> None:
    """Raise `CannotGenerate` for aborted choices that the client could not use.

    They are those whose prompt was not scored, and all where the client says so.
    """
    scores_prompt = isinstance(call, CompletionCall) and call.scores_prompt
    is_aborted = FINISH_REASONS[Finish.ABORTED] in [each.finish for each in choices]
    if is_aborted and (call.abort_is_error or scores_prompt):
        raise CannotGenerate(
            "sleep or a weight update has aborted the request; send it again"
        )


def _error_reply(error: Exception) -> web.Response:
    body = error_body(error)
    headers = {}
    if isinstance(error, CannotGenerate):
        headers["Retry-After"] = _RETRY_AFTER_S
    return web.json_response(body, status=body["error"]["code"], headers=headers)


def _warn_of_pause(host: str, port: int, error: OSError, pause_s: float) -> None:
    """Say on stderr why the endpoint does not listen, and until when it pauses."""
    reason = error.strerror or error
    holder = _holder(host, port)
    if holder is not None:
        reason = f"{reason}, by {holder}"
    print(
        f"warning: the endpoint cannot listen on {host} port {port}: {reason}; it tries"
        f" again after {pause_s:g} s. The replica generates rollouts meanwhile. Free"
        " the port, or set rollout.endpoint.port to a free one (0 = any) when the run"
        " is started again.",
        file=sys.stderr,
        flush=True,
    )


def _holder(host: str, port: int) -> str | None:
    """Return name and id of the process that listens on a port, where it is visible."""
    every_address = ("0.0.0.0", "::")
    try:
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            # Processes of other users have no id here.
            if not listens or connection.pid is None or connection.laddr.port != port:
                continue
            if host in every_address or connection.laddr.ip in (host, *every_address):
                name = psutil.Process(connection.pid).name()
                return f"{name} (process {connection.pid})"
    except (psutil.Error, OSError):
        # The system does not say, or the process has ended meanwhile.
        return None
    return None


def _client_token(variable: str | None) -> str | None:
    """Return the token that clients must send, or None if there is none.

    Args:
        variable: The environment variable that holds the token.
    """
    if variable is None:
        return None

    token = os.environ.get(variable)
    if not token:
        rule = (
            "there is no such environment variable where the rollout role runs, or it"
            " is empty"
        )
        fix = (
            "Set it there, or rollout.endpoint.token_env=null to request no token from"
            " clients."
        )
        raise ConfigError([Problem("rollout.endpoint.token_env", variable, rule, fix)])
    return token
