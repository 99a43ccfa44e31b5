"""A real engine behind real HTTP: replies to outside clients, unnoticed by the run."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from scripts.bench.scripted_engine import ScriptedEngine
from verl_ray.columns.stages import Finish
from verl_ray.config.rollout import EndpointConfig
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import ConfigError, RolloutError
from verl_ray.rollout import endpoint as endpoint_module
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.endpoint import Endpoint
from verl_ray.rollout.requests import (
    Chunk,
    GenerationProgress,
    GenerationRequest,
    Sampling,
)
from verl_ray.rollout.server import RolloutServer
from verl_ray.rollout.vllm_engine import VllmEngine

pytestmark = pytest.mark.vllm

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
MODEL, MAX_MODEL_LEN = "policy", 96
IDS = {"return_token_ids": True}
http = httpx.Client(timeout=60)


class Gate:
    """A gate before the steps of an engine: open, or open for a number of steps."""

    def __init__(self) -> None:
        self.steps, self.is_open = threading.Semaphore(0), True

    def put_before(self, engine: RolloutEngine) -> None:
        advance = engine._step

        def gated() -> Iterator[GenerationProgress]:
            if self.is_open or self.steps.acquire(timeout=0.002):
                yield from advance()

        engine._step = gated  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def path(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3", tie=False)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(path)
    turns = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}={% endif %}"
    return tokenizer


@pytest.fixture(scope="module")
def opened() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def shared(
    start_vllm: Callable[..., VllmEngine], path: Path, opened: Gate
) -> Iterator[RolloutServer]:
    def start() -> VllmEngine:
        torch.set_num_threads(1)  # which torch keeps per thread
        engine = start_vllm(path, initial_version=0)
        opened.put_before(engine)
        return engine

    server = RolloutServer(start)
    yield server
    server.close()


@pytest.fixture
def gate(opened: Gate) -> Iterator[Gate]:
    yield opened
    opened.is_open = True


@pytest.fixture
def server(
    shared: RolloutServer, gate: Gate, path: Path, publish: Any, load_reference: Any
) -> Iterator[RolloutServer]:
    """A server at version 0 that is idle."""
    yield shared
    gate.is_open = True
    shared.run(lambda engine: (engine.abort_update(), engine.abort()))
    soon(lambda: shared.health().in_flight == 0)
    shared.resume()
    if shared.health().policy_version != 0:
        for part in ("weights", "kv_cache"):
            shared.run(lambda engine, part=part: engine.wake(part))
        shared.run(lambda engine: publish(engine, load_reference(path), 0))


def settings(**changes: object) -> EndpointConfig:
    values = {
        "enabled": True,
        "host": "127.0.0.1",
        "port": 0,
        "in_flight": 8,
        "token_env": None,
    }
    return EndpointConfig.model_validate(values | changes)


@pytest.fixture(scope="module")
def endpoint(
    shared: RolloutServer, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Endpoint]:
    endpoint = Endpoint(
        shared, tokenizer, settings(), port=0, model=MODEL, max_model_len=MAX_MODEL_LEN
    )
    yield endpoint
    endpoint.close()


@pytest.fixture
def url(endpoint: Endpoint, server: RolloutServer) -> str:
    return f"http://127.0.0.1:{endpoint.port}"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def soon(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def close(gate: Gate, server: RolloutServer) -> None:
    """Let each further step wait for its release.

    The engine is idle first, since a step under way could still take in what is
    requested next.
    """
    soon(lambda: server.health().in_flight == 0)
    gate.is_open = False
    while gate.steps.acquire(blocking=False):
        pass  # what the test before has released and an open gate did not ask for


def generated(
    server: RolloutServer, prompt: list[int], sampling: Sampling, seed: int
) -> Chunk:
    """The response that the run itself gets."""
    ((chunk,),) = server.respond(
        [GenerationRequest(0, np.array(prompt, np.int32), sampling, seed)]
    )
    return chunk


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def test_a_completion_is_what_the_server_draws(
    client: openai.OpenAI, server: RolloutServer, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = ids(tokenizer, "12+3=")
    for temperature in (0.0, 0.8):
        asked = {
            "max_tokens": 12,
            "temperature": temperature,
            "seed": 7,
            "logprobs": 0,
            "extra_body": IDS,
        }
        reply = client.completions.create(model=MODEL, prompt="12+3=", **asked)
        (choice,) = reply.choices
        expected = generated(server, prompt, Sampling(temperature, 1.0, -1, 12), 7)
        assert choice.token_ids == expected.tokens.tolist()
        assert choice.prompt_token_ids == prompt
        assert choice.logprobs.token_logprobs == expected.log_probs.tolist()
        assert choice.text == "".join(choice.logprobs.tokens).removesuffix("<eos>")
        assert choice.text == tokenizer.decode(
            expected.tokens, skip_special_tokens=True
        )
        assert (
            choice.finish_reason
            == {Finish.STOP: "stop", Finish.LENGTH: "length"}[expected.finish]
        )
        assert choice.policy_versions == [[0, 0]]
        count = len(choice.token_ids)
        usage = reply.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
            5,
            count,
            5 + count,
        )
        as_tokens = client.completions.create(model=MODEL, prompt=prompt, **asked)
        assert as_tokens.choices == reply.choices


def test_a_chat_completion_is_what_the_server_draws_after_the_chat_template(
    client: openai.OpenAI, server: RolloutServer, tokenizer: PreTrainedTokenizerBase
) -> None:
    parts = [{"type": "text", "text": "3"}]
    messages = [
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": "+"},
        {"role": "user", "content": parts},
    ]
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, seed=3, logprobs=True, max_completion_tokens=9,
        extra_body={**IDS, "return_tokens_as_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    (choice,) = reply.choices
    assert reply.prompt_token_ids == ids(tokenizer, "12+3=")
    expected = generated(
        server, reply.prompt_token_ids, Sampling(1.0, 1.0, -1, 9, ()), 3
    )
    assert choice.token_ids == expected.tokens.tolist()
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content == tokenizer.decode(
        expected.tokens, skip_special_tokens=True
    )
    assert [
        one.logprob for one in choice.logprobs.content
    ] == expected.log_probs.tolist()
    assert [one.token for one in choice.logprobs.content] == [
        f"token_id:{token}" for token in expected.tokens
    ]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, extra_body={"ignore_eos": True}
    )
    assert whole.usage.completion_tokens == MAX_MODEL_LEN - 5  # nothing else limits it


def test_the_pieces_of_a_stream_add_up(client: openai.OpenAI, url: str) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 20,
        "seed": 5,
        "n": 3,
        "extra_body": {**IDS, "ignore_eos": True},
    }
    whole = client.completions.create(prompt="1+1=", logprobs=0, **asked)
    streamed = client.completions.create(
        prompt="1+1=",
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
        **asked,
    )
    *events, last = list(streamed)
    assert last.choices == [] and last.usage == whole.usage
    for choice in whole.choices:
        own = [
            event.choices[0]
            for event in events
            if event.choices[0].index == choice.index
        ]
        assert len(own) == 20 and [one.finish_reason for one in own] == [None] * 19 + [
            "length"
        ]
        assert "".join(one.text for one in own) == choice.text
        assert [token for one in own for token in one.token_ids] == choice.token_ids
        assert own[0].prompt_token_ids == choice.prompt_token_ids and not hasattr(
            own[1], "prompt_token_ids"
        )
        # The three are computed together in both, but do not begin in the same step.
        streamed_log_probs = [
            value for one in own for value in one.logprobs.token_logprobs
        ]
        assert streamed_log_probs == pytest.approx(
            choice.logprobs.token_logprobs, abs=1e-5
        )
        assert [one.policy_versions for one in own] == [[[at, 0]] for at in range(20)]

    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "1+1"}], stream=True, **asked
    )
    deltas = [event.choices[0].delta for event in chat if event.choices[0].index == 2]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * 19
    assert "".join(delta.content for delta in deltas) == whole.choices[2].text

    raw = http.post(
        f"{url}/v1/completions", json={"prompt": "1", "max_tokens": 2, "stream": True}
    )
    lines = raw.text.split("\n\n")
    assert raw.headers["content-type"] == "text/event-stream" and lines[-2:] == [
        "data: [DONE]",
        "",
    ]
    assert all(line.startswith("data: {") for line in lines[:-2])


def test_choice_j_has_the_seed_plus_j_and_prompts_come_in_their_order(
    client: openai.OpenAI,
) -> None:
    def texts(**asked: Any) -> list[str]:
        reply = client.completions.create(
            model=MODEL, max_tokens=30, extra_body={"ignore_eos": True}, **asked
        )
        assert [choice.index for choice in reply.choices] == list(
            range(len(reply.choices))
        )
        return [choice.text for choice in reply.choices]

    together = texts(prompt=["1+", "2+"], n=3, seed=40)
    assert together == [
        *texts(prompt="1+", n=3, seed=40),
        *texts(prompt="2+", n=3, seed=40),
    ]
    assert together[:3] == [
        text for seed in (40, 41, 42) for text in texts(prompt="1+", seed=seed)
    ]
    assert len(set(together[:3])) == 3
    assert len(set(texts(prompt=["1+", "1+"], n=2))) == 4  # no seed: nobody knows


def test_what_ends_a_response(
    client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "5+5=",
        "max_tokens": 60,
        "seed": 1,
    }
    free = client.completions.create(
        **asked, extra_body={"ignore_eos": True, **IDS}
    ).choices[0]
    said = [
        token for token in free.token_ids if token > 1
    ]  # without the specials, which have no text
    assert free.finish_reason == "length" and free.text == tokenizer.decode(said)

    pair, other = free.text[20:22], free.text[30:33]
    for stream in (False, True):
        reply = client.completions.create(
            **asked,
            stop=[other, pair],
            stream=stream,
            extra_body={"ignore_eos": True, **IDS},
        )
        choices = [event.choices[0] for event in reply] if stream else reply.choices
        text, tokens = (
            "".join(one.text for one in choices),
            [token for one in choices for token in one.token_ids],
        )
        first = min(free.text.index(pair), free.text.index(other))
        assert text == free.text[:first] and choices[-1].finish_reason == "stop"
        ended = tokenizer.decode(tokens, skip_special_tokens=True)
        assert tokens == free.token_ids[: len(tokens)] and ended.endswith((pair, other))
        assert not tokenizer.decode(tokens[:-1], skip_special_tokens=True).endswith(
            (pair, other)
        )

    token = next(token for token in free.token_ids[10:] if token > 1)
    stopped = client.completions.create(
        **asked, extra_body={"ignore_eos": True, "stop_token_ids": [token], **IDS}
    ).choices[0]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert stopped.finish_reason == "stop" and stopped.text == tokenizer.decode(
        stopped.token_ids[:-1], skip_special_tokens=True
    )


def test_a_run_draws_the_same_whatever_clients_ask_beside_it(
    client: openai.OpenAI, server: RolloutServer
) -> None:
    prompts = np.random.default_rng(0).integers(2, 15, size=(6, 7)).astype(np.int32)
    own = [
        GenerationRequest(number, prompt, Sampling(1.0, 1.0, -1, 40, ()), seed=number)
        for number, prompt in enumerate(prompts)
    ]

    def rows() -> list[list[int]]:
        chunks = sorted(
            (chunk for chunks in server.respond(own) for chunk in chunks),
            key=lambda one: one.request_id,
        )
        return [chunk.tokens.tolist() for chunk in chunks]

    def outside(_: int) -> list[str]:
        asked: dict[str, Any] = {
            "model": MODEL,
            "prompt": "7+7=",
            "max_tokens": 80,
            "n": 4,
            "seed": 9,
        }
        return [
            choice.text
            for choice in client.completions.create(
                **asked, extra_body={"ignore_eos": True}
            ).choices
        ]

    alone, said = rows(), outside(0)
    with ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(outside, number) for number in range(2)]
        soon(lambda: server.health().in_flight > 0)
        assert rows() == alone
        assert [reply.result(60) for reply in replies] == [said, said]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_nothing_in_flight(
    url: str, server: RolloutServer, gate: Gate, stream: bool
) -> None:
    close(gate, server)
    with socket.create_connection(
        ("127.0.0.1", int(url.rpartition(":")[2]))
    ) as connection:
        body = json.dumps(
            {
                "prompt": "1",
                "max_tokens": 80,
                "n": 2,
                "ignore_eos": True,
                "stream": stream,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        soon(lambda: server.health().in_flight == 2)
        if stream:
            gate.steps.release(3)
            said = b""
            while b"data: {" not in said:
                said += connection.recv(4096)
    soon(lambda: server.health().in_flight == 0)


def test_a_weight_update_ends_what_clients_have_in_flight_where_it_is(
    client: openai.OpenAI,
    url: str,
    server: RolloutServer,
    gate: Gate,
    publish: Any,
    make_model: Any,
    load_reference: Any,
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "9+9=",
        "max_tokens": 60,
        "seed": 2,
        "logprobs": 0,
    }
    whole = client.completions.create(
        **asked, extra_body={"ignore_eos": True, **IDS}
    ).choices[0]
    close(gate, server)
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(
            lambda: client.completions.create(
                **asked, extra_body={"ignore_eos": True, **IDS}
            )
        )
        soon(lambda: server.health().in_flight == 1)
        before = server.health().steps
        gate.steps.release(7)
        soon(lambda: server.health().steps >= before + 7 and gate.steps._value == 0)
        own = server.respond(
            [
                GenerationRequest(
                    0, np.array([3], np.int32), Sampling(1.0, 1.0, -1, 5, ()), 0
                )
            ]
        )
        with pytest.raises(
            RolloutError, match="begin_update: 1 requests are in flight"
        ):
            server.run(lambda engine: engine.begin_update(None, 1))  # type: ignore[arg-type]
        assert (
            server.health().in_flight == 2 and not cut.done()
        )  # what the run cannot do costs nobody anything
        own.close()  # type: ignore[attr-defined]
        server.abort()
        soon(lambda: server.health().in_flight == 1)
        other = load_reference(make_model("qwen3", tie=False, seed=1))
        server.run(lambda engine: publish(engine, other, 1, verification_follows=True))
        choice = cut.result(60).choices[0]
        assert (choice.finish_reason, choice.token_ids) == (
            "abort",
            whole.token_ids[:7],
        )
        assert choice.logprobs.token_logprobs == pytest.approx(
            whole.logprobs.token_logprobs[:7], abs=1e-5
        )
        assert choice.policy_versions == [[0, 0]]
    refused = http.post(f"{url}/v1/completions", json=asked)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (
        refused.json()["error"]["message"]
        == "cannot generate: the update to version 1 is open; verify it"
    )
    assert client.models.list().data[0].policy_version is None

    gate.is_open = True
    server.run(lambda engine: (engine.abort_update(), publish(engine, other, 1)))
    again = client.completions.create(
        **asked, extra_body={"ignore_eos": True, **IDS}
    ).choices[0]
    assert again.policy_versions == [[0, 1]] and again.token_ids != whole.token_ids
    assert client.models.list().data[0].policy_version == 1


def test_a_response_that_was_paused_over_a_weight_update_goes_on_and_says_from_where(
    client: openai.OpenAI,
    server: RolloutServer,
    gate: Gate,
    publish: Any,
    path: Path,
    load_reference: Any,
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "4+4=",
        "max_tokens": 30,
        "seed": 2,
    }
    whole = client.completions.create(
        **asked, extra_body={"ignore_eos": True, **IDS}
    ).choices[0]
    close(gate, server)
    with ThreadPoolExecutor(2) as pool:
        paused = pool.submit(
            lambda: client.completions.create(
                **asked, extra_body={"ignore_eos": True, **IDS}
            )
        )
        soon(lambda: server.health().in_flight == 1)
        gate.steps.release(6)
        soon(lambda: gate.steps._value == 0)
        server.pause("keep")
        later = pool.submit(
            lambda: client.completions.create(
                **asked, extra_body={"ignore_eos": True, **IDS}
            )
        )
        server.run(
            lambda engine: publish(engine, load_reference(path), 3)
        )  # the same weights
        gate.is_open = True
        assert not paused.done() and not later.done()
        server.resume()
        choice = paused.result(60).choices[0]
        assert (choice.token_ids, choice.finish_reason) == (whole.token_ids, "length")
        assert choice.policy_versions == [[0, 0], [6, 3]]
        assert later.result(60).choices[0].policy_versions == [[0, 3]]


def test_asleep_it_says_so_and_when_to_come_again(
    client: openai.OpenAI, url: str, server: RolloutServer, gate: Gate
) -> None:
    close(gate, server)
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "1",
        "max_tokens": 30,
        "extra_body": {"ignore_eos": True},
    }
    gate.steps.release(2)
    stream = client.completions.create(**asked, stream=True)
    soon(lambda: gate.steps._value == 0)
    server.run(lambda engine: engine.sleep("kv_cache"))
    events = list(stream)
    assert [event.choices[0].finish_reason for event in events] == [None, None, "abort"]
    gate.is_open = True
    for streams in (False, True):
        with pytest.raises(
            openai.InternalServerError, match="cannot generate: asleep"
        ) as refused:
            client.completions.create(**asked, stream=streams)
        assert (
            refused.value.status_code,
            refused.value.response.headers["retry-after"],
        ) == (503, "1")
    assert http.get(f"{url}/health").json()["in_flight"] == 0
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(
            client.with_options(max_retries=9).completions.create, **asked
        )
        time.sleep(0.2)
        server.run(lambda engine: engine.wake("kv_cache"))
        assert patient.result(60).choices[0].finish_reason == "length"


def test_responses_beyond_in_flight_wait(
    server: RolloutServer, tokenizer: PreTrainedTokenizerBase, gate: Gate
) -> None:
    endpoint = Endpoint(
        server,
        tokenizer,
        settings(in_flight=2),
        port=0,
        model=MODEL,
        max_model_len=MAX_MODEL_LEN,
    )
    close(gate, server)
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "1", "n": 5, "ignore_eos": True}
        asked = pool.submit(
            http.post, f"http://127.0.0.1:{endpoint.port}/v1/completions", json=body
        )
        soon(lambda: server.health().in_flight == 2)
        gate.steps.release(20)
        soon(lambda: gate.steps._value == 0)
        # Two have ended. Two others took their places, one a moment before the other.
        soon(lambda: server.health().in_flight == 2)
        gate.is_open = True
        assert (
            asked.result().json()["usage"]["completion_tokens"] == 5 * 16
        )  # as many as OpenAI's unless told otherwise
    endpoint.close()


def test_a_token_is_asked_for(
    server: RolloutServer,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(port: int = 0) -> Endpoint:
        asking = settings(token_env="CLIENTS_TOKEN")
        return Endpoint(
            server,
            tokenizer,
            asking,
            port=port,
            model=MODEL,
            max_model_len=MAX_MODEL_LEN,
        )

    monkeypatch.delenv("CLIENTS_TOKEN", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"rollout\.endpoint\.token_env = CLIENTS_TOKEN\n.*rule: there is no such",
    ):
        start()
    monkeypatch.setenv("CLIENTS_TOKEN", "s3cret")
    endpoint = start()
    address = f"http://127.0.0.1:{endpoint.port}"
    for header in (
        {},
        {"Authorization": "Bearer s3cre"},
        {"Authorization": "Bearer s3cret2"},
    ):
        refused = http.get(f"{address}/v1/models", headers=header)
        assert refused.status_code == 401 and "s3cret" not in refused.text
    assert http.get(f"{address}/health").status_code == 200
    with openai.OpenAI(base_url=f"{address}/v1", api_key="s3cret") as client:
        assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(
        ConfigError, match=rf"cannot listen on 127.0.0.1 port {endpoint.port}: .*in use"
    ):
        start(endpoint.port)
    endpoint.close()
    endpoint.close()
    with pytest.raises(httpx.ConnectError):
        http.get(f"{address}/health")


@pytest.fixture
def holder() -> Iterator[socket.socket]:
    """Somebody else who listens on a port."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder


def waiting_for(
    holder: socket.socket, server: RolloutServer, tokenizer: PreTrainedTokenizerBase
) -> Endpoint:
    """An endpoint that waits for a port, as at the restart of a replica."""
    port = holder.getsockname()[1]
    return Endpoint(
        server,
        tokenizer,
        settings(port=port),
        port=port,
        model=MODEL,
        max_model_len=MAX_MODEL_LEN,
        waits=True,
    )


def test_an_endpoint_waits_for_its_port_while_the_server_generates(
    holder: socket.socket,
    server: RolloutServer,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(endpoint_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint_module, "_LONGEST_PAUSE_S", 0.02)
    port = holder.getsockname()[1]
    attempts = threading.Semaphore(0)
    listen = Endpoint._listen

    async def counted(self: Endpoint, host: str, port: int) -> None:
        attempts.release()
        await listen(self, host, port)

    monkeypatch.setattr(Endpoint, "_listen", counted)
    endpoint = waiting_for(holder, server, tokenizer)
    prompt = ids(tokenizer, "12+3=")
    assert generated(server, prompt, Sampling(0.0, 1.0, -1, 12), 7).tokens.size
    for _ in range(5):
        assert attempts.acquire(timeout=60)
    assert endpoint.port is None

    holder.close()
    soon(lambda: endpoint.port == port)
    assert http.get(f"http://127.0.0.1:{port}/health").status_code == 200
    endpoint.close()
    warned = capsys.readouterr().err.splitlines()
    # Only a longer pause is news.
    for line, pause in zip(warned, ("0.01", "0.02"), strict=True):
        assert f"port {port}: " in line and f"(process {os.getpid()})" in line
        assert f"again after {pause} s" in line and "rollout.endpoint.port" in line


def test_an_endpoint_that_is_closed_waits_no_longer_for_its_port(
    holder: socket.socket,
    server: RolloutServer,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_module, "_FIRST_PAUSE_S", 3600)
    endpoint = waiting_for(holder, server, tokenizer)
    closing = threading.Thread(target=endpoint.close, daemon=True)
    closing.start()
    closing.join(timeout=60)  # of the hour that the pause may take
    assert not closing.is_alive() and not endpoint._thread.is_alive()
    assert endpoint.port is None


def test_an_engine_that_fails_says_so_in_the_middle_of_a_stream(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    gate = Gate()
    gate.is_open = False
    gate.steps.release()  # the stream begins, and does not end before the other call

    def script(asked: GenerationRequest) -> list[tuple[int, float]]:
        if asked.tokens[0] == 3:
            return [(3, -0.5)] * 9
        gate.is_open = True
        return []  # nothing to draw: the step fails

    def start() -> ScriptedEngine:
        engine = ScriptedEngine(script, initial_version=0)
        gate.put_before(engine)
        return engine

    server = RolloutServer(start)
    endpoint = Endpoint(
        server, tokenizer, settings(), port=0, model=MODEL, max_model_len=MAX_MODEL_LEN
    )
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{endpoint.port}/v1", api_key="none", max_retries=0
    ) as client:
        stream = client.completions.create(
            model=MODEL, prompt=[3], max_tokens=9, stream=True
        )
        assert next(stream).choices[0].text == "1"
        for _ in range(2):
            with pytest.raises(
                openai.InternalServerError, match="a step failed: IndexError"
            ):
                client.completions.create(model=MODEL, prompt=[4])
        with pytest.raises(openai.APIError, match="a step failed: IndexError"):
            list(stream)
    endpoint.close()
    server.close()


REFUSED = [
    (
        {"prompt": "1", "max_tokens": 96},
        "max_tokens",
        "1 prompt tokens and max_tokens = 96 are more than the 96 tokens",
    ),
    ({"prompt": "1" * 96}, "prompt", "96 prompt tokens are more than the 96 tokens"),
    (
        {"prompt": ["1"] * 1000, "n": 2},
        "n",
        "1000 prompts with n = 2 are more than the 1024 responses of one call",
    ),
    (
        {"prompt": "1" * 100_000},
        "prompt",
        "100000 characters are more than 96 tokens have",
    ),
    ({"prompt": "1x"}, None, "prompt: the tokenizer .* cannot encode '1x'"),
    ({"prompt": [3, 15]}, None, "found the token ids 3 to 15, expected 0 to 14"),
    (
        {"prompt": "1", "frequency_penalty": 0.5},
        "frequency_penalty",
        "frequency_penalty = 0.5: .* not support it",
    ),
    (
        {"prompt": "1", "model": "gpt"},
        "model",
        "model = 'gpt': this endpoint serves 'policy'",
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_what_is_refused_leaves_the_engine_as_it_is(
    url: str,
    client: openai.OpenAI,
    server: RolloutServer,
    body: dict[str, Any],
    param: str | None,
    message: str,
) -> None:
    refused = http.post(f"{url}/v1/completions", json=body)
    error = refused.json()["error"]
    assert refused.status_code == error["code"] == (404 if param == "model" else 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert re.search(message, error["message"])
    assert (
        client.completions.create(
            model=MODEL, prompt="1", max_tokens=1
        ).usage.completion_tokens
        == 1
    )


def test_what_is_no_call(
    url: str, client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase
) -> None:
    for method, route, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/embeddings", 404),
    ):
        reply = http.request(method, url + route)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, status)
    form = http.post(f"{url}/v1/completions", data={"prompt": "1"})
    assert (form.status_code, form.json()["error"]["type"]) == (
        415,
        "invalid_request_error",
    )
    for content in (b"{", b"[" * 100_000, b"[]", b"\xff"):
        reply = http.post(
            f"{url}/v1/completions",
            content=content,
            headers={"Content-Type": "application/json"},
        )
        assert reply.status_code == 400
    template, tokenizer.chat_template = tokenizer.chat_template, None
    with pytest.raises(
        openai.BadRequestError, match="no chat template; use /v1/completions"
    ):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "1"}]
        )
    tokenizer.chat_template = template


def test_the_command_of_the_page(url: str) -> None:
    command = re.search(r"^curl (?:.*\\\n)*.*", PAGE.read_text(), re.MULTILINE)
    assert command is not None
    program, address, *options = shlex.split(command.group().replace("\\\n", " "))
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert program == "curl" and address.startswith("http://127.0.0.1:8100/v1/")
    name, _, value = given["-H"].partition(": ")
    reply = http.post(
        url + address.removeprefix("http://127.0.0.1:8100"),
        content=given["-d"],
        headers={name: value},
    )
    assert reply.status_code == 200, reply.text
    assert "policy_versions" in reply.json()["choices"][0]
