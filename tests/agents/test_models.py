"""Frozen models that environments talk to, behind a server in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.agents.chat_server import ChatServer, chat_server, echo, says, settings
from verl_ray.agents.models import ChatModel, model, provide
from verl_ray.agents.threads import result_of
from verl_ray.errors import ConfigError, ModelServiceError

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def asked(server: ChatServer, sampling: dict[str, Any] | None = None, **changes: Any) -> str:  # fmt: skip
    chat_model = ChatModel("user", settings(server.url, **changes))
    return asyncio.run(chat_model.chat(HELLO, **(sampling or {})))


def test_a_model_answers_as_it_is_asked(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(server) == "you said hello"
    # Nothing of the server's own defaults decides about the answer.
    assert server.calls == [{"messages": HELLO, "temperature": 0.0, "seed": 0}]
    assert server.paths == {"/v1/chat/completions"} and server.tokens == [None]

    monkeypatch.setenv("USERS_TOKEN", "s3cret")
    own = {"seed": 7, "max_tokens": 3}
    asked(server, own, model="big", temperature=0.5, token_env="USERS_TOKEN")
    assert server.calls[1] == {
        "model": "big", "messages": HELLO, "temperature": 0.5, "seed": 7, "max_tokens": 3,
    }  # fmt: skip
    assert server.tokens[1] == "Bearer s3cret"
    monkeypatch.delenv("USERS_TOKEN")
    with pytest.raises(ConfigError, match="USERS_TOKEN"):
        asked(server, token_env="USERS_TOKEN")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            (400, {"error": "no such model"}),
            "POST http://.*/v1/chat/completions: .* status 400: .*no such model",
        ),
        (says(None), "the content of the reply is None, expected a text"),
        ((200, {"choices": []}), "the reply has no message in choices"),
        ((200, ["?"]), "the reply has no message in choices"),
    ],
)
def test_what_is_no_answer_is_an_error(
    server: ChatServer, answer: Any, words: str
) -> None:
    server.behave = lambda call: answer
    with pytest.raises(ModelServiceError, match=f"agent.models.user: .*{words}"):
        asked(server)
    assert len(server.calls) == 1


def test_a_server_that_is_away_is_waited_for(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_ray.agents.models._BACKOFF_S", 0.01)

    def restarting(call: dict[str, Any]) -> Any:
        return echo(call) if len(server.calls) > 5 else (503, {})

    server.behave = restarting
    # Four times, then once more to find out whether it is away.
    assert asked(server) == "you said hello"
    assert [call["messages"][0]["content"] for call in server.calls] == [
        *["hello"] * 4, *["Hello"] * 2, "hello",
    ]  # fmt: skip

    server.behave = lambda call: (503, {})
    words = r"agent.models.user.url=http://127.0.0.1:\d+/v1 has not answered for .*agent.models.user.max_outage_s"
    with pytest.raises(ModelServiceError, match=words):
        asked(server, max_outage_s=0.1)


def test_calls_are_bounded_and_belong_to_their_event_loop(server: ChatServer) -> None:
    both = threading.Barrier(2, timeout=20)

    def paired(call: dict[str, Any]) -> Any:
        both.wait()
        return echo(call)

    server.behave = paired
    chat_model = ChatModel("user", settings(server.url, concurrency=2))

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(chat_model.chat(HELLO) for _ in range(6)))

    for _ in range(2):
        assert asyncio.run(ask_all()) == ["you said hello"] * 6
    assert server.most_busy == 2


def test_plain_code_asks_in_its_thread(server: ChatServer) -> None:
    """Its calls are bounded together with all others of the event loop."""
    chat_model = ChatModel("user", settings(server.url, concurrency=1))

    def plain() -> str:
        return chat_model.chat_sync(HELLO, max_tokens=3)

    async def main() -> list[str]:
        with pytest.raises(RuntimeError, match="only a method or a tool without async"):
            plain()
        asynchronous = [chat_model.chat(HELLO) for _ in range(3)]
        return await asyncio.gather(
            *(result_of(plain) for _ in range(3)), *asynchronous
        )

    assert asyncio.run(main()) == ["you said hello"] * 6
    assert server.most_busy == 1
    assert sum(call.get("max_tokens") == 3 for call in server.calls) == 3

    server.behave = lambda call: (400, {"error": "no such model"})
    with pytest.raises(ModelServiceError, match="no such model"):
        asyncio.run(result_of(plain))


def test_a_model_has_a_name() -> None:
    provide({})
    with pytest.raises(ConfigError, match=r"agent\.models\.NAME="):
        model("user")
    provide({"user": settings("http://127.0.0.1:1/v1")})
    assert isinstance(model("user"), ChatModel)
    with pytest.raises(ConfigError, match=r"[Dd]id you mean user"):
        model("usr")
    provide({})
