"""The real clients of OpenAI and Anthropic get what was sampled, and repeat it as it was."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from verl_ray.agents.contract import Action, Sampled, ToolCall
from verl_ray.agents.gateway.calls import (
    CallChoice,
    CallReply,
    Event,
    ModelCall,
    Protocol,
)
from verl_ray.agents.gateway.chat import ChatProtocol
from verl_ray.agents.gateway.conversation import served
from verl_ray.agents.gateway.messages import MessagesProtocol
from verl_ray.agents.gateway.responses import ResponsesProtocol
from verl_ray.errors import CallRefused

CHAT, RESPONSES, MESSAGES = ChatProtocol(), ResponsesProtocol(), MessagesProtocol()
PATHS: dict[str, Protocol] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}

# ------------------------------------------------------------------------------- a server


@dataclass
class Endpoint:
    """A server that answers each call with the same reply, and keeps the calls."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    reply: CallReply | None = None
    parts: list[tuple[int, str, str]] = field(default_factory=list)
    calls: list[ModelCall] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a turn."""
        protocol = PATHS[request.path]
        try:
            if request.headers.get("x-refuse") is not None:
                status, _, code = request.headers["x-refuse"].partition(" ")
                raise CallRefused("Not so.", "model", int(status), code or None)
            call = protocol.read(await request.json())
        except CallRefused as refusal:
            return web.json_response(protocol.error(refusal), status=refusal.status)

        self.calls.append(call)
        assert self.reply is not None
        if not call.is_stream:
            return web.json_response(protocol.whole(call, self.reply))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for name, data in self.events(protocol, call):
            named = f"event: {name}\n" if name else ""
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"{named}data: {text}\n\n".encode())
        return response

    def events(self, protocol: Protocol, call: ModelCall) -> Iterator[Event]:
        """Yield an answer of which `parts` are told before it is whole."""
        assert self.reply is not None
        stream = protocol.stream(call, replace(self.reply, choices=()))
        yield from stream.begin()
        for part in self.parts:
            yield from stream.grow(*part)
        yield from stream.end(self.reply)

    async def count(self, request: web.Request) -> web.StreamResponse:
        """Answer a request that counts tokens by the number of its messages."""
        call = MESSAGES.read_count(await request.json())
        return web.json_response(MESSAGES.count(len(call.messages)))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        common: Any = {"api_key": "secret", "max_retries": 0}
        endpoint = Endpoint(
            openai.OpenAI(base_url=f"{url}/v1", **common),
            anthropic.Anthropic(base_url=url, **common),
        )
        with running(endpoint, listener):
            yield endpoint


@contextmanager
def running(endpoint: Endpoint, listener: socket.socket) -> Iterator[None]:
    """Serve in a thread."""
    app = web.Application()
    for path in PATHS:
        app.router.add_post(path, endpoint.answer)
    app.router.add_post("/v1/messages/count_tokens", endpoint.count)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, listener).start()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


# ------------------------------------------------------------------------------- dialects

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


class OfChat:
    """An agent over chat completions."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = endpoint.openai.chat.completions
        self.said: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "2 + 3, 4 + 5?"}]},
        ]
        function = {
            "name": ADD["name"],
            "description": ADD["description"],
            "parameters": ADD["schema"],
        }
        self.tools: list[Any] = [{"type": "function", "function": function}]

    def _body(self) -> dict[str, Any]:
        return {"model": "m", "messages": self.said, "tools": self.tools}

    def ask(self, **more: Any) -> Any:
        return self._client.create(**self._body(), **more)

    def stream(self) -> Any:
        options: Any = {"include_usage": True}
        with self._client.stream(**self._body(), stream_options=options) as events:
            try:
                return events.get_final_completion()
            except openai.LengthFinishReasonError as error:
                return error.completion

    def plain(self) -> list[tuple[str, str]]:
        """Return the kinds and texts of a plain stream."""
        chunks = list(self.ask(stream=True))
        assert chunks[-1].choices[0].finish_reason is not None
        parts = []
        for chunk in chunks:
            delta = chunk.choices[0].delta
            parts += [("thought", part) for part in [getattr(delta, "reasoning", "")]]
            parts += [("text", delta.content or "")]
            for call in delta.tool_calls or []:
                parts.append((call.function.name, call.function.arguments))
        return [part for part in parts if part[1]]

    def read(self, answer: Any) -> tuple[Any, ...]:
        """Return thoughts, words, calls, end and numbers of tokens of an answer."""
        (choice,) = answer.choices
        message = choice.message
        calls = [
            (each.id, each.function.name, json.loads(each.function.arguments))
            for each in message.tool_calls or []
        ]
        # Beside calls there are words or null, as in OpenAI's answers, and no empty text.
        assert message.content is None or message.content or not calls
        usage = answer.usage.prompt_tokens, answer.usage.completion_tokens
        thought = getattr(message, "reasoning", "")
        return thought, message.content or "", calls, choice.finish_reason, usage

    def repeat(self, answer: Any, results: Sequence[tuple[str, str]]) -> None:
        message = answer.choices[0].message
        self.said.append(message.model_dump(exclude_none=True))
        for call_id, text in results:
            result = {"role": "tool", "tool_call_id": call_id, "content": text}
            self.said.append(result)
        self.said.append({"role": "user", "content": "Go on."})


class OfResponses:
    """An agent over responses."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = endpoint.openai.responses
        self.said: list[Any] = [{"role": "user", "content": "2 + 3, 4 + 5?"}]
        self.tools: list[Any] = [
            {
                "type": "function",
                "name": ADD["name"],
                "description": ADD["description"],
                "parameters": ADD["schema"],
                "strict": True,
            }
        ]

    def _body(self) -> dict[str, Any]:
        return {
            "model": "m",
            "instructions": "Be brief.",
            "input": self.said,
            "tools": self.tools,
        }

    def ask(self, **more: Any) -> Any:
        return self._client.create(**self._body(), **more)

    def stream(self) -> Any:
        with self._client.stream(**self._body()) as events:
            last = list(events)[-1]
        # The client makes an object of its own of a whole answer, and of no other.
        return last.response

    def plain(self) -> list[tuple[str, str]]:
        events = list(self.ask(stream=True))
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(len(events)))
        kinds = {"response.reasoning_text.delta": "thought"}
        kinds |= {"response.output_text.delta": "text"}
        kinds |= {"response.function_call_arguments.delta": "add"}
        deltas = [event for event in events if event.type in kinds]
        return [(kinds[event.type], event.delta) for event in deltas if event.delta]

    def read(self, answer: Any) -> tuple[Any, ...]:
        items = answer.output
        thoughts = [
            part.text
            for each in items
            if each.type == "reasoning"
            for part in each.content
        ]
        calls = [
            (each.call_id, each.name, json.loads(each.arguments))
            for each in items
            if each.type == "function_call"
        ]
        usage = answer.usage.input_tokens, answer.usage.output_tokens
        ends = {"completed": "stop", "incomplete": "length"}
        end = ends[answer.status]
        if answer.incomplete_details is not None:
            assert answer.incomplete_details.reason == "max_output_tokens"
        if calls:
            end = "tool_calls"
        return "".join(thoughts), answer.output_text, calls, end, usage

    def repeat(self, answer: Any, results: Sequence[tuple[str, str]]) -> None:
        self.said += answer.output
        for call_id, text in results:
            self.said.append(
                {"type": "function_call_output", "call_id": call_id, "output": text}
            )
        self.said.append({"role": "user", "content": "Go on."})


class OfMessages:
    """An agent over messages."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = endpoint.anthropic.messages
        self.said: list[Any] = [{"role": "user", "content": "2 + 3, 4 + 5?"}]
        self.tools: list[Any] = [
            {
                "name": ADD["name"],
                "description": ADD["description"],
                "input_schema": ADD["schema"],
                "cache_control": {"type": "ephemeral"},
            }
        ]

    def _body(self) -> dict[str, Any]:
        system = [{"type": "text", "text": "Be brief."}]
        body = {"model": "m", "max_tokens": 64, "system": system}
        return {**body, "messages": self.said, "tools": self.tools}

    def ask(self, **more: Any) -> Any:
        return self._client.create(**self._body(), **more)

    def stream(self) -> Any:
        with self._client.stream(**self._body()) as events:
            return events.get_final_message()

    def plain(self) -> list[tuple[str, str]]:
        events = list(self.ask(stream=True))
        kinds = {"thinking_delta": "thought", "text_delta": "text"}
        kinds |= {"input_json_delta": "add"}
        parts = []
        for event in events:
            if event.type == "content_block_delta":
                delta = event.delta.to_dict()
                kind = delta.pop("type")
                parts += [(kinds[kind], text) for text in delta.values()]
        return parts

    def read(self, answer: Any) -> tuple[Any, ...]:
        blocks = answer.content
        thoughts = [each.thinking for each in blocks if each.type == "thinking"]
        texts = [each.text for each in blocks if each.type == "text"]
        calls = [
            (each.id, each.name, each.input)
            for each in blocks
            if each.type == "tool_use"
        ]
        usage = answer.usage.input_tokens, answer.usage.output_tokens
        ends = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
        end = ends[answer.stop_reason]
        return "".join(thoughts), "".join(texts), calls, end, usage

    def repeat(self, answer: Any, results: Sequence[tuple[str, str]]) -> None:
        self.said.append({"role": "assistant", "content": answer.content})
        blocks: list[Any] = [{"type": "text", "text": "Go on."}]
        for call_id, text in results:
            block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
            blocks.append(block)
        self.said.append({"role": "user", "content": blocks})


DIALECTS = [OfChat, OfResponses, OfMessages]

# --------------------------------------------------------------------------------- replies

CALLS = (
    ToolCall("add", {"a": 2, "b": 3}),
    ToolCall("add", {"a": 4, "note": "größer ⇒ “9”", "more": [{"x": None}, 1.5, True]}),
)


def choice(*texts: str, **action: Any) -> CallChoice:
    """Return a turn of tokens with these texts, each with the log-prob -0.5."""
    calls = action.get("tool_calls", ())
    turn = Action(tokens=range(len(texts)), **{"text": "".join(texts), **action})
    log_probs = [-0.5] * len(texts)
    sampled = Sampled(turn.tokens, log_probs, [(0, 0)], turn)
    ids = [f"call_{number}" for number in range(len(calls))]
    return CallChoice(sampled=sampled, call_ids=ids, token_texts=texts)


def reply(*choices: CallChoice) -> CallReply:
    return CallReply(
        number="7f", model="policy", created=5, num_prompt_tokens=11, choices=choices
    )


CASES = {
    "words": choice("It", " is", " größer: 五."),
    "nothing": choice("<end>", text=""),
    "thoughts": choice("t", "w", text="Five.", reasoning="2 + 3\n\nis 5 "),
    "calls": choice("t", "c", "c", text="", reasoning="Add.", tool_calls=CALLS),
    "words and calls": choice("w", "c", text="Wait:\n", tool_calls=CALLS),
    "cut": choice("It", " is", finish="length"),
    "cut thoughts": choice("It", text="", reasoning="It", finish="length"),
    "unreadable call": choice("<tool_call>{", parse_error="it is cut"),
}

# ----------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_agent_gets_and_repeats_what_was_sampled(
    endpoint: Endpoint, dialect: Any, name: str
) -> None:
    agent = dialect(endpoint)
    turn = CASES[name]
    action = turn.sampled.action
    endpoint.reply = reply(turn)

    answer = agent.ask()
    calls = [
        (call_id, call.name, dict(call.arguments))
        for call_id, call in zip(turn.call_ids, action.tool_calls, strict=True)
    ]
    end = "tool_calls" if calls else action.finish
    usage = (11, len(action.tokens))
    assert agent.read(answer) == (action.reasoning, action.text, calls, end, usage)
    assert answer.model == "policy"
    assert answer.id == PATHS_BY_DIALECT[dialect].response_id(endpoint.reply)

    streamed = agent.stream()
    assert plain_values(streamed) == plain_values(answer)
    parts = [("thought", action.reasoning), ("text", action.text)]
    parts += [("add", json.dumps(call[2], ensure_ascii=False)) for call in calls]
    assert agent.plain() == [part for part in parts if part[1]]

    # The same comes by parts, each as it is known.
    endpoint.parts = [
        *((0, letter, "") for letter in action.reasoning),
        *((0, "", letter) for letter in action.text[:3]),
    ]
    assert plain_values(agent.stream()) == plain_values(answer)
    assert len([each for each in agent.plain() if each[0] == "text"]) == min(
        len(action.text), 4
    )
    endpoint.parts = []

    # The results come in another order than the calls.
    agent.repeat(streamed, [(call[0], f"Result {call[0]}") for call in calls[::-1]])
    agent.ask()
    expected: dict[str, Any] = {"role": "assistant", "content": action.text}
    if action.reasoning:
        expected["reasoning"] = action.reasoning
    if calls:
        expected["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": n, "arguments": a}}
            for id_, n, a in calls
        ]
    results = [
        {
            "role": "tool",
            "name": "add",
            "tool_call_id": call[0],
            "content": f"Result {call[0]}",
        }
        for call in calls
    ]
    call = endpoint.calls[-1]
    assert call.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3, 4 + 5?"},
        expected,
        *results,
        {"role": "user", "content": "Go on."},
    ]
    assert call.messages[2] == served(turn)
    assert list(call.messages[2]) == list(served(turn))
    function = {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": ADD["schema"],
    }
    assert call.tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_parts_of_a_stream_keep_their_order_and_are_not_taken_back(
    endpoint: Endpoint, dialect: Any
) -> None:
    """Thoughts behind words have no place in a response, whose items make a turn by their
    order.
    """
    agent = dialect(endpoint)
    turn = choice("t", text="Hm. No.", reasoning="a\nb", tool_calls=CALLS[:1])
    endpoint.reply = reply(turn)
    endpoint.parts = [(0, "a", ""), (0, "", "Hm."), (0, "\nb", "")]
    late = [("thought", "\nb")] if dialect is not OfResponses else []
    sent = ("add", '{"a": 2, "b": 3}')
    assert agent.plain() == [
        ("thought", "a"), ("text", "Hm."), *late, ("text", " No."), sent,
    ]  # fmt: skip
    assert "".join(agent.read(agent.stream())[1].split()) == "Hm.No."

    # In the end these words are none: nothing else is said, and the call is sent.
    endpoint.parts = [(0, "a", ""), (0, "", "<call")]
    assert agent.plain() == [("thought", "a"), ("text", "<call"), *late, sent]
    agent.repeat(agent.stream(), [])
    endpoint.parts = []
    agent.ask()
    said, _ = endpoint.calls[-1].messages[2:]
    assert said["content"] == "<call" and len(said["tool_calls"]) == 1


PATHS_BY_DIALECT = {OfChat: CHAT, OfResponses: RESPONSES, OfMessages: MESSAGES}


def plain_values(answer: Any) -> Any:
    """Return an answer as plain values, without what clients add to streamed ones."""
    return without_added(answer.model_dump(mode="json", exclude_none=True))


def without_added(value: Any) -> Any:
    if isinstance(value, list):
        return [without_added(each) for each in value]
    if not isinstance(value, dict):
        return value
    added = {"parsed_arguments"} | ({"index"} if "function" in value else set())
    return {k: without_added(v) for k, v in value.items() if k not in added}


def read(protocol: Protocol, **body: Any) -> ModelCall:
    """Return the call of a body that asks to answer `Hi`, with further fields."""
    hello = {"role": "user", "content": "Hi"}
    whole: dict[str, Any] = {"messages": [hello], "model": "m"}
    if protocol is RESPONSES:
        whole = {"input": [hello], "model": "m"}
    if protocol is MESSAGES:
        whole["max_tokens"] = 64
    return protocol.read({**whole, **body})


TOOLS: Any = {
    CHAT: [
        {"type": "function", "function": {"name": name, "strict": True}}
        for name in ("add", "look")
    ],
    RESPONSES: [
        {"type": "function", "name": name, "strict": True} for name in ("add", "look")
    ],
    MESSAGES: [{"name": name, "input_schema": {}} for name in ("add", "look")],
}


def test_choices_have_log_probs_and_end_at_a_text(endpoint: Endpoint) -> None:
    client = endpoint.openai.chat.completions
    endpoint.reply = reply(
        choice("It", " is 五", ".\nObs: 3", reasoning="Hm"), choice("Five", "<end>")
    )
    body: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    body |= {"n": 2, "logprobs": True, "stop": ["Obs:", "<end>"]}

    whole = client.create(**body)
    assert [each.message.content for each in whole.choices] == ["It is 五.\n", "Five"]
    log_probs = whole.choices[0].logprobs
    assert log_probs is not None and log_probs.content is not None
    assert [each.token for each in log_probs.content] == ["It", " is 五", ".\nObs: 3"]
    assert log_probs.content[1].bytes == [32, 105, 115, 32, 228, 186, 148]
    assert {each.logprob for each in log_probs.content} == {-0.5}
    # The text of half a character is not its bytes.
    endpoint.reply = reply(choice("\ufffd", "é"))
    (half,) = client.create(**{**body, "n": 1}).choices
    assert half.logprobs is not None and half.logprobs.content is not None
    assert [each.bytes for each in half.logprobs.content] == [None, [195, 169]]
    endpoint.reply = reply(
        choice("It", " is 五", ".\nObs: 3", reasoning="Hm"), choice("Five", "<end>")
    )
    assert whole.usage is not None and whole.usage.total_tokens == 11 + 3 + 2

    options: Any = {"include_usage": True}
    with client.stream(**body, stream_options=options) as events:
        streamed = events.get_final_completion()
    assert plain_values(streamed) == plain_values(whole)

    # Without stream_options the last chunk is that of the last choice.
    *_, last = client.create(**body, stream=True)
    assert (last.choices[0].index, last.choices[0].finish_reason) == (1, "stop")


def test_a_message_says_which_text_ended_it(endpoint: Endpoint) -> None:
    client = endpoint.anthropic.messages
    endpoint.reply = reply(choice("It is", " so</answer> "))
    body: Any = {"model": "m", "max_tokens": 9, "stop_sequences": ["no", "</answer>"]}
    body["messages"] = [{"role": "user", "content": "Hi"}]
    whole = client.create(**body)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "</answer>")
    assert whole.content[0].to_dict() == {"type": "text", "text": "It is so"}
    with client.stream(**body) as events:
        assert plain_values(events.get_final_message()) == plain_values(whole)
    assert endpoint.calls[-1].stop == ["no", "</answer>"]
    thought = choice("Hm", " no so", text="", reasoning="Hm no so")
    assert served(thought, ["no"])["reasoning"] == "Hm "
    del body["max_tokens"], body["stop_sequences"]
    assert client.count_tokens(**body, system="S").input_tokens == 2


def test_clients_raise_their_own_errors(endpoint: Endpoint) -> None:
    expected = {
        "400": ("BadRequestError", "invalid_request_error", "invalid_request_error"),
        "401": ("AuthenticationError", "authentication_error", "authentication_error"),
        "403": ("PermissionDeniedError", "permission_error", "permission_error"),
        "404": ("NotFoundError", "invalid_request_error", "not_found_error"),
        "413": (None, "invalid_request_error", "request_too_large"),
        "429": ("RateLimitError", "rate_limit_error", "rate_limit_error"),
        "500": ("InternalServerError", "server_error", "api_error"),
        "529": (None, "server_error", "overloaded_error"),
    }
    for status, (name, *kinds) in expected.items():
        headers = {"x-refuse": status}
        for each, kind in zip((OfResponses, OfMessages), kinds, strict=True):
            module = openai if each is OfResponses else anthropic
            with pytest.raises(module.APIStatusError) as caught:
                each(endpoint).ask(extra_headers=headers)
            assert name in (None, type(caught.value).__name__)
            assert caught.value.status_code == int(status)
            body: Any = caught.value.body
            body = body.get("error", body)
            assert (body["type"], body["message"]) == (kind, "Not so.")

    headers = {"x-refuse": "400 context_length_exceeded"}
    with pytest.raises(openai.BadRequestError) as refused:
        OfChat(endpoint).ask(extra_headers=headers)
    assert (refused.value.code, refused.value.param) == (
        "context_length_exceeded",
        "model",
    )
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: Not so"):
        OfMessages(endpoint).ask(extra_headers=headers)


SCHEMA = {"type": "object", "properties": {"x": {"type": "number"}}}
DEEP: Any = {}
for _ in range(70):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("protocol", "body", "constraint"),
    [
        (CHAT, {"response_format": {"type": "text"}}, None),
        (CHAT, {"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            CHAT,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        (CHAT, {"tool_choice": "auto"}, None),
        (CHAT, {"tool_choice": "required"}, {"tools": ["add", "look"]}),
        (
            CHAT,
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
            {"tools": ["look"]},
        ),
        (
            RESPONSES,
            {
                "text": {
                    "format": {"type": "json_schema", "name": "n", "schema": SCHEMA}
                }
            },
            {"json": SCHEMA},
        ),
        (
            RESPONSES,
            {"tool_choice": {"type": "function", "name": "add"}},
            {"tools": ["add"]},
        ),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        (MESSAGES, {"tool_choice": {"type": "any"}}, {"tools": ["add", "look"]}),
        (
            MESSAGES,
            {
                "tool_choice": {
                    "type": "tool",
                    "name": "look",
                    "disable_parallel_tool_use": False,
                }
            },
            {"tools": ["look"]},
        ),
    ],
)
def test_what_constrains_the_tokens_is_named(
    protocol: Protocol, body: Any, constraint: Any
) -> None:
    call = read(protocol, tools=TOOLS[protocol], **body)
    assert call.constraint == constraint
    assert len(call.tools) == 2


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES])
def test_no_tool_is_offered_where_none_may_be_called(protocol: Protocol) -> None:
    none: Any = {"type": "none"} if protocol is MESSAGES else "none"
    assert read(protocol, tools=TOOLS[protocol], tool_choice=none).tools == []


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def assistant(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "a", **more}]}


@pytest.mark.parametrize(
    ("protocol", "body", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "Hi"}, "messages"),
        (CHAT, {"messages": ["Hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"content": "Hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "function"}]}, "messages[0].role"),
        (CHAT, user([{"type": "image_url"}]), "messages[0].content[0].type"),
        (CHAT, user([{"type": "text"}]), "messages[0].content[0].text"),
        (CHAT, user(5), "messages[0].content"),
        (CHAT, assistant(function_call={}), "messages[0].function_call"),
        (CHAT, assistant(refusal="No."), "messages[0].refusal"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "", "name": "x" * 65}]},
            "messages[0].name",
        ),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": "", "tool_call_id": "x" * 257}]},
            "messages[0].tool_call_id",
        ),
        (RESPONSES, {"previous_response_id": "x" * 257}, "previous_response_id"),
        (MESSAGES, {"stop_sequences": ["x" * 1025]}, "stop_sequences"),
        (CHAT, assistant(audio={"id": "a"}), "messages[0].audio"),
        (
            CHAT,
            assistant(tool_calls=[{"id": "i", "type": "custom"}]),
            "messages[0].tool_calls[0].type",
        ),
        (
            CHAT,
            assistant(tool_calls=[{"id": "i"}]),
            "messages[0].tool_calls[0].function.name",
        ),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"tools": [{"type": "custom"}]}, "tools[0].type"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function.name"),
        (
            CHAT,
            {"tools": [{"function": {"name": "f", "parameters": DEEP}}]},
            "tools[0].function.parameters",
        ),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": "soon"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            CHAT,
            {
                "tools": TOOLS[CHAT],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
        (CHAT, {"parallel_tool_calls": False}, "parallel_tool_calls"),
        (CHAT, {"response_format": {"type": "regex"}}, "response_format.type"),
        (
            CHAT,
            {"response_format": {"type": "json_schema"}},
            "response_format.schema",
        ),
        (CHAT, {"stop": [""]}, "stop"),
        (CHAT, {"stop": ["a"] * 17}, "stop"),
        (CHAT, {"n": 17}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": "9"}, "max_completion_tokens"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"top_p": float("nan")}, "top_p"),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"presence_penalty": 0.5}, "presence_penalty"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"stream_options": {"often": True}}, "stream_options.often"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"moderation": {"model": "m"}}, "moderation"),
        (CHAT, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].type"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            RESPONSES,
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"conversation": "c"}, "conversation"),
        (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"stop": ["a"]}, "stop"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "tool"}]}, "messages[0].role"),
        (MESSAGES, assistant(), "messages"),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "redacted_thinking"}]}
                ]
            },
            "messages[0].content[0].type",
        ),
        (MESSAGES, user([{"type": "document"}]), "messages[0].content[0].type"),
        (
            MESSAGES,
            user(
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "i",
                        "content": [{"type": "image"}],
                    }
                ]
            ),
            "messages[0].content[0].content[0].type",
        ),
        (
            MESSAGES,
            {"tools": [{"type": "bash_20250124", "name": "b"}]},
            "tools[0].type",
        ),
        (
            MESSAGES,
            {
                "tools": TOOLS[MESSAGES],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            "tool_choice.disable_parallel_tool_use",
        ),
        (MESSAGES, {"container": "c"}, "container"),
        (MESSAGES, {"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        (
            MESSAGES,
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    protocol: Protocol, body: Any, param: str
) -> None:
    with pytest.raises(CallRefused) as caught:
        read(protocol, **body)
    refusal = caught.value
    assert (refusal.param, refusal.status) == (param, 400)
    assert refusal.message.startswith(f"{param}: ")
    assert len(refusal.message) < 300


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES])
def test_a_hostile_body_is_refused(protocol: Protocol) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "half \ud800"):
        with pytest.raises(CallRefused, match="cannot be read"):
            read(protocol, metadata=value)
    body: Any = [5]
    with pytest.raises(CallRefused, match="expected an object, found"):
        protocol.read(body)


def test_arguments_that_are_no_object_stay_texts() -> None:
    texts = {
        "": {},
        "{": "{",
        "[1]": "[1]",
        '{"a": "\\ud800"}': '{"a": "\\ud800"}',
        "[" * 5000: "[" * 5000,
        json.dumps(DEEP): json.dumps(DEEP),
    }
    calls = [
        {"id": "i", "function": {"name": "f", "arguments": each}} for each in texts
    ]
    call = read(CHAT, **assistant(tool_calls=calls))
    values = [each["function"]["arguments"] for each in call.messages[0]["tool_calls"]]
    assert values == list(texts.values())


def test_what_agents_send_by_default_is_read() -> None:
    # As smolagents writes it.
    body: dict[str, Any] = user(
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    )
    body |= {"stop": ["Observation:"], "temperature": 0.2, "seed": 3, "top_p": None}
    body |= {"user": "u", "store": False, "presence_penalty": 0, "max_tokens": 5}
    call = read(CHAT, **body, reasoning_effort="low", max_completion_tokens=7)
    assert call == ModelCall(
        messages=[{"role": "user", "content": "a\nb"}],
        tools=[],
        stop=["Observation:"],
        max_tokens=7,
        sampling={"temperature": 0.2, "seed": 3},
        unheeded={"reasoning_effort"},
    )

    # As openai-agents writes it.
    body = {"include": [], "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
    body |= {"previous_response_id": "resp_1", "store": True, "truncation": "disabled"}
    body |= {"input": "Hi", "max_output_tokens": 9, "background": False}
    call = read(RESPONSES, **body)
    assert call == ModelCall(
        messages=[{"role": "user", "content": "Hi"}],
        tools=[],
        max_tokens=9,
        previous="resp_1",
        unheeded={"reasoning.effort", "text.verbosity"},
    )
    answer = RESPONSES.whole(call, reply(choice("Hi")))
    assert answer["previous_response_id"] == "resp_1"

    # As Claude Code writes it.
    cache = {"cache_control": {"type": "ephemeral"}}
    system = ["x-anthropic-billing-header: cc_version=2;", "You code.", "Be brief."]
    body = {"system": [{"type": "text", "text": text, **cache} for text in system]}
    body |= {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    body |= {"context_management": {"edits": [edit]}, "metadata": {"user_id": "u"}}
    reminder = {"role": "system", "content": "Remember."}
    body |= {
        "messages": [{"role": "user", "content": "Hi"}, reminder],
        "temperature": 1,
    }
    assert read(MESSAGES, **body, stream=True) == ModelCall(
        messages=[
            {"role": "system", "content": "You code.\nBe brief."},
            {"role": "user", "content": "Hi"},
            reminder,
        ],
        tools=[],
        stop=[],
        max_tokens=64,
        is_stream=True,
        sampling={"temperature": 1},
        unheeded={"thinking", "output_config.effort"},
    )

    # What says no more than its absence does.
    body = {"reasoning": {"summary": "auto", "effort": None}}
    body |= {"text": {"verbosity": "medium"}, "input": "Hi"}
    assert not read(RESPONSES, **body).unheeded
    body = user("Hi") | {"thinking": {"type": "disabled"}}
    assert not read(MESSAGES, **body).unheeded


def test_results_stand_in_the_order_of_their_calls() -> None:
    calls = [
        {"id": each, "function": {"name": f"f{each}", "arguments": "{}"}}
        for each in "abc"
    ]
    said = [{"role": "assistant", "content": None, "tool_calls": calls}]
    for call_id in "cab":
        result = {"role": "tool", "tool_call_id": call_id, "content": "r"}
        said.append(result)
    messages = read(CHAT, messages=said).messages[1:]
    assert [each["tool_call_id"] for each in messages] == list("abc")
    assert [each["name"] for each in messages] == ["fa", "fb", "fc"]

    # An unknown id leaves all as they are.
    said[2]["tool_call_id"] = "z"
    messages = read(CHAT, messages=said).messages[1:]
    assert [each["tool_call_id"] for each in messages] == list("czb")

    block = {"type": "tool_result", "tool_use_id": "a", "is_error": True}
    for text, expected in (("No.", "Error: No."), ("Error: No.", "Error: No.")):
        call = read(MESSAGES, **user([{**block, "content": text}]))
        assert [each["content"] for each in call.messages] == [expected]


def test_items_of_a_turn_make_one_message() -> None:
    def call(name: str) -> dict[str, Any]:
        fields = {"call_id": name, "name": name, "arguments": "{}"}
        return {"type": "function_call", **fields}

    def thought(text: str) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": text}],
        }

    said = {"type": "message", "role": "assistant", "content": "Done."}
    output = {"type": "function_call_output", "call_id": "f", "output": "5"}
    items = [call("f"), call("g"), thought("Hm"), said, said, thought("So"), call("h")]
    messages = read(RESPONSES, input=[*items, output]).messages
    summary = [
        (
            each.get("reasoning"),
            each["content"],
            [each["id"] for each in each.get("tool_calls", ())],
        )
        for each in messages
    ]
    assert summary == [
        (None, "", ["f", "g"]),
        ("Hm", "Done.", []),
        (None, "Done.", []),
        ("So", "", ["h"]),
        (None, "5", []),
    ]
