"""A teacher behind vLLM servers: log-probs of rows, token by token.

The request is one of OpenAI's completions with vLLM's `prompt_logprobs`: the tokens of
a row are the prompt, and the reply has the log-probs of each, and those of the most
probable tokens in its place.

Invariant: every response token has a log-prob, or the call fails and says why. A server
that is away as a whole is waited for (`outage.py`). Of a reply only numbers of response
tokens are kept. All servers are asked at the same time, and errors name the key of one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from verl_ray.columns.stages import Float32, Int32, LogProbs, Rows
from verl_ray.config.distill import TeacherService, keys_of_servers
from verl_ray.errors import ConfigError, GraderOutage, ModelServiceError, Problem
from verl_ray.ops.outputs import TopTokens
from verl_ray.profiling.progress import advance
from verl_ray.rewards.client import (
    RequestFailure,
    ServiceClient,
    ServiceLimits,
    excerpt,
    json_in,
    unparsed,
)

_ATTEMPTS = 4
_BACKOFF_S = 0.5
_MAX_REPLY_BYTES = 1 << 30
"""A row of 100,000 tokens, with some 70 bytes for each of 64 tokens in each place, has
half of it."""


@dataclass(frozen=True)
class ServerNeeds:
    """Requirements of a run on the server of a teacher.

    Attributes:
        text: A text that many tokens of the vocabulary spell.
        tokens: What the actor's tokenizer reads it as.
        top: Which of the most probable tokens are asked for; None = none.
        row_tokens: Tokens of the longest row.
    """

    text: str
    tokens: Sequence[int]
    top: TopTokens | None
    row_tokens: int


@dataclass(frozen=True)
class _Places:
    """Log-probs of the response tokens of a row, and the best tokens in each place."""

    log_probs: Float32
    top_tokens: Int32
    top_log_probs: Float32


def no_log_probs(rows: Rows, top: TopTokens | None) -> LogProbs:
    """Return the columns of log-probs without a value."""
    return LogProbs(offsets=rows.offsets, **_columns(rows.num_tokens, top))


def _columns(num_tokens: int, top: TopTokens | None) -> dict[str, Any]:
    """Return the columns that a teacher fills in, by their names in `LogProbs`."""
    columns: dict[str, Any] = {"log_probs": np.zeros(num_tokens, np.float32)}
    if top is not None:
        shape = num_tokens, top.count
        columns["top_tokens"] = np.zeros(shape, np.int32)
        columns["top_log_probs"] = np.full(shape, -np.inf, np.float32)
    return columns


class RemoteTeacher:
    """The teacher of a run, asked by one process."""

    def __init__(self, services: Mapping[str, TeacherService]) -> None:
        """Take the servers by their keys; nothing is sent yet."""
        self._servers = {key: _Server(key, each) for key, each in services.items()}

    def log_probs(
        self, rows: Rows, sources: Sequence[str], top: TopTokens | None
    ) -> LogProbs:
        """Return the teacher's log-probs of the response tokens, at temperature 1.

        Args:
            rows: Whole token sequences.
            sources: The data source of each row, which decides what server is asked.
            top: Which of the most probable tokens are asked for; None = none.

        Raises:
            ConfigError: An address or a token cannot be used, or a data source has no
                server.
            ModelServiceError: A server is away for longer than the limit, refuses a
                row, or a reply lacks a token.
        """
        keys = keys_of_servers(self._servers, sources)
        numbers: dict[str, list[int]] = {}
        for number in np.unique(rows.row_of_token[rows.response_mask]).tolist():
            numbers.setdefault(keys[sources[number]], []).append(number)
        places = asyncio.run(self._ask_all(rows, numbers, top))

        # Rows without response tokens have no places.
        columns = _columns(rows.num_tokens, top)
        for name, values in columns.items():
            if places:
                parts = [getattr(places[number], name) for number in sorted(places)]
                values[rows.response_mask] = np.concatenate(parts)
        return LogProbs(offsets=rows.offsets, **columns)

    def require(self, needs: ServerNeeds) -> None:
        """Wait until the servers are there, and check that they fit a run.

        Raises:
            ConfigError: One is not there, or its model has another vocabulary or too
                few positions, or it gives too few log-probs.
        """
        problems = asyncio.run(self._problems(needs))
        if problems:
            raise ConfigError(problems)

    async def _ask_all(
        self, rows: Rows, numbers: Mapping[str, Sequence[int]], top: TopTokens | None
    ) -> dict[int, _Places]:
        """Return what each server says of its rows, by their numbers."""
        replies = await asyncio.gather(
            *(
                self._servers[key].ask_all(rows, own, top)
                for key, own in numbers.items()
            )
        )
        return {number: place for reply in replies for number, place in reply.items()}

    async def _problems(self, needs: ServerNeeds) -> list[Problem]:
        servers = self._servers.values()
        problems = await asyncio.gather(*(each.problem(needs) for each in servers))
        return [problem for problem in problems if problem is not None]


class _Server:
    """One of the servers of a teacher."""

    def __init__(self, key: str, config: TeacherService) -> None:
        self._key = key
        self._config = config
        self._limits = ServiceLimits(
            url=config.url,
            token_env=config.token_env,
            concurrency=config.concurrency,
            requests_per_s=None,
            request_timeout_s=config.timeout_s,
            deadline_s=config.timeout_s,
            max_attempts=_ATTEMPTS,
            backoff_s=_BACKOFF_S,
            max_outage_s=config.max_outage_s,
        )
        base = config.url.rstrip("/")
        self._address = f"{base}/completions"
        # vLLM has it beside OpenAI's API.
        self._tokenize_address = f"{base.removesuffix('/v1')}/tokenize"

    def _body(self, **fields: object) -> bytes:
        named = {} if self._config.model is None else {"model": self._config.model}
        return json.dumps({**named, **fields}).encode()

    def _request(self, tokens: Sequence[int], top: TopTokens | None) -> bytes:
        count = 0 if top is None else top.count
        return self._body(
            prompt=list(tokens), max_tokens=1, temperature=0, prompt_logprobs=count
        )

    def _client(self, address: str, probe: bytes) -> ServiceClient:
        return ServiceClient(self._limits, self._key, probe, address, _MAX_REPLY_BYTES)

    async def ask_all(
        self, rows: Rows, numbers: Sequence[int], top: TopTokens | None
    ) -> dict[int, _Places]:
        """Return what the server says of each of these rows, by its number."""
        client = self._client(self._address, self._request([0, 0], None))
        places = asyncio.Semaphore(self._config.concurrency)

        async def ask(number: int) -> _Places:
            row = slice(rows.offsets[number], rows.offsets[number + 1])
            tokens = rows.tokens[row].tolist()
            learned = np.flatnonzero(rows.response_mask[row]).tolist()
            async with places:
                read = partial(_places_in, tokens, learned, top)
                reply = await client.ask(self._request(tokens, top), read)
            advance(1, "rows")
            if isinstance(reply, RequestFailure):
                words = f"{self._key}: POST {self._address}: {reply.detail}"
                raise ModelServiceError(words)
            return reply

        try:
            async with asyncio.TaskGroup() as group:
                tasks = {each: group.create_task(ask(each)) for each in numbers}
        except* (ModelServiceError, GraderOutage) as errors:
            raise ModelServiceError(str(errors.exceptions[0])) from None
        finally:
            await client.close()
        return {number: task.result() for number, task in tasks.items()}

    async def problem(self, needs: ServerNeeds) -> Problem | None:
        """Return why the server does not fit; None if it does."""
        url = self._config.url
        body = self._body(prompt=needs.text, add_special_tokens=False)
        reply = await self._answer(self._tokenize_address, body, _tokens_in)
        if isinstance(reply, Problem):
            return reply
        tokens, positions = reply
        if tokens != list(needs.tokens):
            pairs = zip(tokens, needs.tokens, strict=False)
            differ = [f"{there} for {here}" for there, here in pairs if there != here]
            rule = (
                "the server's model has another vocabulary than the actor: a text of"
                f" {len(needs.tokens)} tokens has {len(tokens)}, first"
                f" {', '.join(differ[:3]) or 'all the same'}"
            )
            fix = "Serve a model with the actor's tokenizer."
            return Problem(f"{self._key}.url", url, rule, fix)
        # It samples one token, which nobody reads.
        if positions <= needs.row_tokens:
            rule = (
                f"the server takes {positions} tokens, and a row may have"
                f" {needs.row_tokens}, with one more behind it"
            )
            fix = f"Start it with --max-model-len {needs.row_tokens + 1} or more."
            return Problem(f"{self._key}.url", url, rule, fix)

        body = self._request([*needs.tokens[:1]] * 2, needs.top)
        answer = await self._answer(self._address, body, json_in)
        return answer if isinstance(answer, Problem) else None

    async def _answer(
        self, address: str, body: bytes, read: Callable[[bytes], Any]
    ) -> Any:
        """Return what is read of a reply, or the problem of a server without one."""
        client = self._client(address, body)
        try:
            reply = await client.ask(body, read)
            rule = reply.detail if isinstance(reply, RequestFailure) else ""
        except GraderOutage as error:
            reply, rule = None, str(error)
        finally:
            await client.close()
        if not rule:
            return reply
        fix = (
            "Start a vLLM server, with --max-logprobs of distill.top_k, or correct url,"
            " model or token_env. The url usually ends with /v1."
        )
        rule = f"POST {address}: {rule}"
        return Problem(f"{self._key}.url", self._config.url, rule, fix, may_pass=True)


# ------------------------------------------------------------------------------ replies


def _tokens_in(body: bytes) -> tuple[list[int], int] | RequestFailure:
    """Return the tokens of a text and the server's positions, or why there are none."""
    reply = json_in(body)
    if isinstance(reply, RequestFailure):
        return reply
    try:
        return [int(token) for token in reply["tokens"]], int(reply["max_model_len"])
    except (TypeError, LookupError, ValueError):
        return unparsed(f"no reply of a vLLM server: {excerpt(body)}")


def _places_in(
    tokens: Sequence[int],
    learned: Sequence[int],
    top: TopTokens | None,
    body: bytes,
) -> _Places | RequestFailure:
    """Return what a reply says of the response tokens of its row, or why nothing.

    Args:
        tokens: The tokens of the row.
        learned: Which of them are of the response.
        top: Which of the most probable tokens are asked for; None = none.
        body: The reply.
    """
    reply = json_in(body)
    if isinstance(reply, RequestFailure):
        return reply
    count = 0 if top is None else top.count
    result = _Places(
        np.zeros(len(learned), np.float32),
        np.zeros((len(learned), count), np.int32),
        np.full((len(learned), count), -np.inf, np.float32),
    )
    try:
        entries = reply["choices"][0]["prompt_logprobs"]
        for number, place in enumerate(learned):
            ranked = sorted(entries[place].items(), key=lambda item: item[1]["rank"])
            by_token = {int(token): entry["logprob"] for token, entry in ranked}
            result.log_probs[number] = by_token[tokens[place]]
            if top is not None:
                best = [each for each in by_token if each < top.num_tokens][:count]
                values = [by_token[each] for each in best]
                result.top_tokens[number, : len(best)] = best
                result.top_log_probs[number, : len(best)] = values
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return unparsed(
            "expected the log-probs of each token of a row, as a vLLM server has them"
            f" in prompt_logprobs ({type(error).__name__}: {error}): {excerpt(body)}"
        )
    return result
