"""A rollout server over HTTP, as OpenAI's API has it, for clients outside of the run: an evaluation harness, an agent.

Invariant: no client can stop or change the run. What a client asks is drawn from seeds of its own, beside the run's
rows and at most `in_flight` responses at a time; it gives way to sleep and to weight updates (`finish_reason` "abort",
with what was drawn), during which calls are answered with 503 and when to come again; a client that goes away takes its
requests with it. Deliberately not here: which fields there are (`openai_api`), vLLM, and where the run says that
this is (`controllers/rollouts/endpoints.py`).

GET /health, GET /v1/models, POST /v1/completions, POST /v1/chat/completions.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import os
import secrets
import threading
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from verl_ray.config.rollout import EndpointConfig
from verl_ray.data.stages import Finish
from verl_ray.data.tokenizers import encode, render
from verl_ray.errors import CallRefused, CannotGenerate, ConfigError, DataError, EngineFailed, Problem, RolloutError
from verl_ray.rollout.openai_api import FINISH, SEEDS, Answers, Call, ChatCall, CompletionCall, Part, read_call
from verl_ray.rollout.requests import Chunk, Request, Sampling, Tokens
from verl_ray.rollout.server import RolloutServer
from verl_ray.rollout.texts import GrowingText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHOICES = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat completion may fill the engine's length

_MOST_BODY_BYTES = 1 << 24
_RETRY_AFTER_S = "1"
_SHRINKS = 4  # times that normalising may shorten a text before it is cut into tokens
_LAST_CALLS_S = 0.1


class Endpoint:
    def __init__(
        self,
        server: RolloutServer,
        tokenizer: PreTrainedTokenizerBase,
        config: EndpointConfig,
        *,
        port: int,
        model: str,
        max_model_len: int,
    ) -> None:
        """Listens when this returns.

        Args:
            port: 0 = any that is free.
            model: what the policy is called.
            max_model_len: most tokens of prompt and response together.

        Raises:
            ConfigError: it cannot listen there, or the token that clients must send is not known here.
        """
        self._server, self._tokenizer = server, tokenizer
        self._model, self._max_model_len = model, max_model_len
        self._longest_text = _SHRINKS * max_model_len * max(map(len, tokenizer.get_vocab()))
        self._end_tokens: tuple[int, ...] = server.run(lambda engine: engine.end_tokens)
        self._token = _token(config.token_env)
        self._room = asyncio.Semaphore(config.in_flight)
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(
            self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_CALLS_S
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout endpoint", daemon=True)
        self._thread.start()
        try:
            self.port: int = asyncio.run_coroutine_threadsafe(self._listen(config.host, port), self._loop).result()
        except OSError as error:
            self.close()
            rule = f"a rollout server cannot listen on {config.host} port {port}: {error.strerror or error}"
            fix = "Give a port that is free, or 0 for any, and an address of the machine in rollout.endpoint.host."
            raise ConfigError([Problem("rollout.endpoint.port", config.port, rule, fix)]) from None

    def close(self) -> None:
        """End the calls under way and stop listening. Again is no error."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------------------------------------------------- routes

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=_MOST_BODY_BYTES, middlewares=[self._guard])
        application.add_routes([
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.post("/v1/completions", lambda request: self._answer(request, CompletionCall)),
            web.post("/v1/chat/completions", lambda request: self._answer(request, ChatCall)),
        ])  # fmt: skip
        return application

    async def _listen(self, host: str, port: int) -> int:
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Ask for the token, and answer errors as OpenAI does."""
        try:
            if self._token is not None and request.path != "/health":
                sent = request.headers.get("Authorization", "")
                if not hmac.compare_digest(sent.encode(errors="replace"), f"Bearer {self._token}".encode()):
                    raise CallRefused("expected the right token in the header Authorization: Bearer TOKEN", status=401)
            return await handler(request)
        except web.HTTPException as error:
            return _error(CallRefused(f"{request.method} {request.path}: {error.reason}", status=error.status))
        except ConnectionError:
            raise  # the client has gone
        except Exception as error:
            return _error(error)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(dataclasses.asdict(self._server.health()))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {
            "id": self._model, "object": "model", "created": 0, "owned_by": "verl_ray",
            "max_model_len": self._max_model_len, "policy_version": self._server.health().policy_version,
        }  # fmt: skip
        return web.json_response({"object": "list", "data": [model]})

    async def _answer(self, request: web.Request, kind: type[Call]) -> web.StreamResponse:
        if request.content_type != "application/json":  # which a page in a browser may not send to another site
            raise CallRefused(f"expected Content-Type: application/json, found {request.content_type}", status=415)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise CallRefused(f"the body is no JSON: {error}") from None
        call = read_call(kind, body)
        if call.model not in (None, self._model):
            raise CallRefused(f"model = {call.model!r}: this endpoint serves {self._model!r}", "model", status=404)
        choices = self._choices(call, self._prompts(call))
        head = {"id": f"{call.PREFIX}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._model}
        answers = Answers(call, head, lambda token: str(self._tokenizer.decode([token])))
        if call.stream:
            return await self._stream(request, call, choices, answers)
        await self._draw_all(choices)
        wholes = [Part.join(choice.parts) for choice in choices]
        return web.json_response(answers.whole(wholes, [choice.prompt for choice in choices], _usage(call, choices)))

    async def _stream(
        self, request: web.Request, call: Call, choices: Sequence[_Choice], answers: Answers
    ) -> web.StreamResponse:
        events = _Events(request)

        async def send(choice: _Choice, part: Part) -> None:
            await events.send(answers.event(part, choice.prompt))

        try:
            await self._draw_all(choices, send)
        except Exception as error:
            if not events.begun or isinstance(error, ConnectionError):
                raise
            await events.send(_error_body(error))
        else:
            if call.stream_options.include_usage:
                await events.send(answers.last_event(_usage(call, choices)))
        return await events.end()

    # ------------------------------------------------------------------------------------------------------ drawing

    def _prompts(self, call: Call) -> list[Tokens]:
        if isinstance(call, ChatCall):
            if not self._tokenizer.chat_template:
                raise CallRefused("messages: the tokenizer of this model has no chat template; use /v1/completions")
            self._require_short((str(message["content"]) for message in call.messages), "messages")
            texts = render(self._tokenizer, [call.messages], add_generation_prompt=True, where=lambda _: "messages")
            return [encode(self._tokenizer, texts, special=False, where=lambda _: "messages")[0]]
        assert isinstance(call, CompletionCall)
        if len(call.prompt) * call.n > MAX_CHOICES:
            asked = f"{len(call.prompt)} prompts with n = {call.n}"
            raise CallRefused(f"{asked} are more than the {MAX_CHOICES} responses of one call", "n")
        self._require_short((prompt for prompt in call.prompt if isinstance(prompt, str)), "prompt")
        return [
            encode(self._tokenizer, [prompt], special=True, where=lambda _: "prompt")[0]
            if isinstance(prompt, str)
            else np.array(prompt, np.int32)
            for prompt in call.prompt
        ]

    def _require_short(self, texts: Iterable[str], field: str) -> None:
        """Before any is cut into tokens, which takes its time."""
        for text in texts:
            if len(text) > self._longest_text:
                raise CallRefused(f"{len(text)} characters are more than {self._max_model_len} tokens have", field)

    def _choices(self, call: Call, prompts: Sequence[Tokens]) -> list[_Choice]:
        """`call.n` to each prompt; number j has the seed `call.seed` + j."""
        choices: list[_Choice] = []
        for prompt in prompts:
            sampling, tokens = self._sampling(call, len(prompt)), prompt.tolist()
            for number in range(call.n):
                seed = secrets.randbelow(SEEDS) if call.seed is None else (call.seed + number) % SEEDS
                request = Request(
                    len(choices), prompt, sampling, seed, stream=call.stream or bool(call.stop),
                    session=call.session_id, gives_way=True,
                )  # fmt: skip
                choices.append(_Choice(request, tokens, GrowingText(self._tokenizer, call.stop)))
        return choices

    def _sampling(self, call: Call, prompt_tokens: int) -> Sampling:
        room, wanted = self._max_model_len - prompt_tokens, call.max_tokens
        field = "max_tokens"
        if isinstance(call, ChatCall) and call.max_completion_tokens is not None:
            field, wanted = "max_completion_tokens", call.max_completion_tokens
        if room < 1 or (wanted or 0) > room:
            asked = f"{prompt_tokens} prompt tokens" + (f" and {field} = {wanted}" if wanted else "")
            field = field if room > 0 else "messages" if isinstance(call, ChatCall) else "prompt"
            raise CallRefused(f"{asked} are more than the {self._max_model_len} tokens of this endpoint", field)
        usual = room if isinstance(call, ChatCall) else min(room, DEFAULT_COMPLETION_TOKENS)
        ends = () if call.ignore_eos else self._end_tokens
        return Sampling(
            call.temperature, call.top_p, call.top_k or -1, wanted or usual,
            tuple(sorted({*ends, *call.stop_token_ids})),
        )  # fmt: skip

    async def _draw_all(self, choices: Sequence[_Choice], tell: _Tell | None = None) -> None:
        """All choices beside each other, each part told as it comes; the first that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._draw(choice, tell))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _draw(self, choice: _Choice, tell: _Tell | None) -> None:
        async with self._room, aclosing(self._server.respond_async([choice.request])) as answers:
            async for chunks in answers:
                for chunk in chunks:
                    part = choice.take(chunk)
                    if tell is not None:
                        await tell(choice, part)
                    if part.finish is not None:
                        return


@dataclass(frozen=True)
class _Choice:
    """One response to one prompt, and what there is of it; the request's id is its number among the choices."""

    request: Request
    prompt: list[int]
    text: GrowingText
    parts: list[Part] = field(default_factory=list)

    def take(self, chunk: Chunk) -> Part:
        """What is new, up to where a stop string ends."""
        tokens = chunk.tokens.tolist()
        said = tokens[:-1] if chunk.finish is Finish.STOP else tokens  # the text is without the token that ends it
        count, text = self.text.add(said, last=chunk.finish is not None)
        finish = None if chunk.finish is None else FINISH[chunk.finish]
        if self.text.stopped:
            tokens, finish = tokens[:count], FINISH[Finish.STOP]
        spans = tuple(span for span in chunk.version_spans if span[0] < chunk.first_token + len(tokens))
        log_probs = chunk.log_probs[: len(tokens)].tolist()
        self.parts.append(Part(self.request.request_id, chunk.first_token, text, tokens, log_probs, spans, finish))
        return self.parts[-1]


_Tell = Callable[[_Choice, Part], Awaitable[None]]


class _Events:
    """Server-sent events, which begin with the first: before it, a call can still fail with a status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self._order = asyncio.Lock()

    @property
    def begun(self) -> bool:
        return self._response.prepared

    async def send(self, event: Mapping[str, object] | str) -> None:
        async with self._order:
            if not self.begun:
                await self._response.prepare(self._request)
            text = event if isinstance(event, str) else json.dumps(event)
            await self._response.write(f"data: {text}\n\n".encode())

    async def end(self) -> web.StreamResponse:
        await self.send("[DONE]")
        await self._response.write_eof()
        return self._response


def _usage(call: Call, choices: Sequence[_Choice]) -> dict[str, int]:
    given = sum(len(choice.prompt) for choice in choices[:: call.n])
    made = sum(len(part.tokens) for choice in choices for part in choice.parts)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _error(error: Exception) -> web.Response:
    body = _error_body(error)
    headers = {"Retry-After": _RETRY_AFTER_S} if isinstance(error, CannotGenerate) else {}
    return web.json_response(body, status=body["error"]["code"], headers=headers)


def _error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's form; what is nobody's mistake is shown in the log of the process, too."""
    param = error.param if isinstance(error, CallRefused) else None
    if isinstance(error, CallRefused):
        status = error.status
    elif isinstance(error, CannotGenerate):
        status = 503
    elif isinstance(error, RolloutError | DataError) and not isinstance(error, EngineFailed):
        status = 400
    else:
        status = 500
        traceback.print_exception(error)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": status}}


def _token(variable: str | None) -> str | None:
    """What clients must send; None: nothing."""
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        rule = "there is no such environment variable where the rollout role runs, or it is empty"
        fix = "Set it there, or rollout.endpoint.token_env=null to ask for no token."
        raise ConfigError([Problem("rollout.endpoint.token_env", variable, rule, fix)])
    return token
