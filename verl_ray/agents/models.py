"""Frozen models that environments talk to, such as simulated users and judges.

Each is a server with OpenAI's API, which `agent.models` names and the user runs. An
environment takes one by its name::

    answer = await model("user").chat([{"role": "user", "content": "Hello"}])

Methods and tools without `async` call `chat_sync`.

Invariant: an answer is what the server said. Where it says nothing, the call raises an
error that names its key.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from verl_ray.agents.contract import Message
from verl_ray.agents.threads import in_loop
from verl_ray.errors import ConfigError, GraderOutage, ModelServiceError, Problem
from verl_ray.rewards.client import (
    RequestFailure,
    ServiceClient,
    ServiceLimits,
    excerpt,
    json_in,
    unparsed,
)
from verl_ray.suggest import did_you_mean

KEY = "agent.models"
"""The section of the configuration: name -> model."""

_USUAL_END = "/v1"
_FIX = f"Set {KEY}.NAME={{url: http://HOST:PORT/v1}} for this name."
_ATTEMPTS = 4
_BACKOFF_S = 0.5
_HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The server of a model; the attributes are keys of `config.agent.ModelService`."""

    url: str
    model: str | None
    token_env: str | None
    temperature: float
    timeout_s: float
    max_outage_s: float
    concurrency: int


class ChatModel:
    """A model behind a server. It may be asked from any task of any event loop."""

    def __init__(self, name: str, settings: ChatSettings) -> None:
        """Take the model's name in the configuration and its server."""
        self._key = f"{KEY}.{name}"
        self._settings = settings
        self._address = f"{settings.url.rstrip('/')}/chat/completions"
        self._limits = ServiceLimits(
            url=settings.url,
            token_env=settings.token_env,
            concurrency=settings.concurrency,
            requests_per_s=None,
            request_timeout_s=settings.timeout_s,
            deadline_s=settings.timeout_s,
            max_attempts=_ATTEMPTS,
            backoff_s=_BACKOFF_S,
            max_outage_s=settings.max_outage_s,
        )
        # Connections belong to an event loop.
        self._by_loop: WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[ServiceClient, asyncio.Semaphore]
        ] = WeakKeyDictionary()

    async def chat(self, messages: Sequence[Message], **sampling: Any) -> str:
        """Return the model's next message in a conversation, as text.

        Args:
            messages: The conversation, as in OpenAI's API.
            sampling: Further fields of the request, such as `max_tokens` or `seed`. The
                temperature is that of the configuration unless it is given, and the
                seed 0, so that the same messages have the same answer, as far as the
                server is reproducible.

        Raises:
            ConfigError: The address or the token cannot be used.
            ModelServiceError: The server is away, refuses the request, or its reply has
                no text.
        """
        client, places = self._of_this_loop()
        try:
            async with places:
                reply = await client.ask(self._body(messages, sampling), _message_in)
        except GraderOutage as error:
            raise ModelServiceError(str(error)) from None
        if isinstance(reply, RequestFailure):
            raise ModelServiceError(f"{self._key}: {self._tried(reply)}")
        text = reply.get("content")
        if not isinstance(text, str):
            raise ModelServiceError(
                f"{self._key}: the content of the reply is {text!r:.200}, expected a"
                " text"
            )
        return text

    def chat_sync(self, messages: Sequence[Message], **sampling: Any) -> str:
        """Return what `chat` does, to a method or a tool without `async`.

        Raises:
            ConfigError: As in `chat`.
            ModelServiceError: As in `chat`.
            RuntimeError: This is not the thread of such a call.
        """
        return in_loop(lambda: self.chat(messages, **sampling))

    async def problem(self) -> Problem | None:
        """Ask the server once for a token; return why it gives none."""
        client, _ = self._of_this_loop()
        body = self._body(_HELLO, {"max_tokens": 1})
        reply = await client.try_once(body, _message_in)
        if not isinstance(reply, RequestFailure):
            return None
        fix = (
            "Start the server, or correct url, model or token_env. The nodes of the"
            " rollout replicas must reach it, too."
        )
        url = self._settings.url
        if not url.rstrip("/").endswith(_USUAL_END):
            fix += f" The url usually ends with {_USUAL_END}."
        rule = self._tried(reply)
        return Problem(f"{self._key}.url", url, rule, fix, may_pass=True)

    def _tried(self, failure: RequestFailure) -> str:
        """Return what was sent to the server, and why it has no answer."""
        # Without a query, which may hold a secret.
        address = self._address.partition("?")[0]
        return f"POST {address}: {failure.detail}"

    def _body(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> bytes:
        settings = self._settings
        named = {} if settings.model is None else {"model": settings.model}
        usual = {"temperature": settings.temperature, "seed": 0}
        fields = {**named, "messages": list(messages), **usual, **sampling}
        return json.dumps(fields).encode()

    def _of_this_loop(self) -> tuple[ServiceClient, asyncio.Semaphore]:
        """Return the client of the running event loop, and the places of its calls."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            probe = self._body(_HELLO, {"max_tokens": 1})
            client = ServiceClient(self._limits, self._key, probe, self._address)
            places = asyncio.Semaphore(self._settings.concurrency)
            self._by_loop[loop] = client, places
        return self._by_loop[loop]


def _message_in(body: bytes) -> dict[str, Any] | RequestFailure:
    """Return the first message of a reply, or the failure to read it."""
    reply = json_in(body)
    if isinstance(reply, RequestFailure):
        return reply
    try:
        message = reply["choices"][0]["message"]
    except (TypeError, LookupError):
        message = None
    if not isinstance(message, dict):
        return unparsed(f"the reply has no message in choices: {excerpt(body)}")
    return message


# ------------------------------------------------------------- models of this process

_models: dict[str, ChatModel] = {}


def provide(models: Mapping[str, ChatSettings]) -> None:
    """Let `model` return these models in this process, and no others."""
    _models.clear()
    _models.update({name: ChatModel(name, each) for name, each in models.items()})


def model(name: str) -> ChatModel:
    """Return the model of `agent.models.NAME`.

    Raises:
        ConfigError: The run has no such model.
    """
    if name not in _models:
        fix = did_you_mean(name, list(_models), "model") if _models else _FIX
        rule = "an environment asks for this model, and there is none of this name"
        raise ConfigError([Problem(KEY, name, rule, fix)])
    return _models[name]
