"""A teacher behind servers: what it says of rows, and what is refused of its replies.

A real vLLM server is asked in tests/controllers/trainers/test_distill.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.agents.chat_server import Answer, ChatServer, chat_server
from verl_ray.columns.batch import offsets_of
from verl_ray.columns.stages import Rows
from verl_ray.config.distill import TEACHER_KEY, TeacherService
from verl_ray.errors import ConfigError, ModelServiceError
from verl_ray.ops.outputs import TopTokens
from verl_ray.rewards.teacher import RemoteTeacher, ServerNeeds

TOP = TopTokens(2, 10)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        server.behave = scored
        yield server


def entry(rank: int, log_prob: float) -> dict[str, Any]:
    return {"rank": rank, "logprob": log_prob, "decoded_token": "?"}


def scored(call: dict[str, Any]) -> Answer:
    """Give each token the log-prob of minus itself.

    In each place token 12 is the most probable one, then token 3 and token 5.
    """
    best = {"12": entry(1, -0.1), "3": entry(2, -3.0), "5": entry(3, -5.0)}
    places = [
        best | ({} if str(token) in best else {str(token): entry(9, -float(token))})
        for token in call["prompt"]
    ]
    return 200, {"choices": [{"prompt_logprobs": [None, *places[1:]]}]}


def rows_of(*rows: list[int]) -> Rows:
    """Return rows whose tokens but the first are of the response."""
    offsets = offsets_of([len(row) for row in rows])
    mask = np.ones(offsets[-1], np.bool_)
    mask[offsets[:-1]] = False
    return Rows(
        offsets=offsets,
        tokens=np.array([token for row in rows for token in row], np.int32),
        response_mask=mask,
    )


def teacher(server: ChatServer, **changes: Any) -> RemoteTeacher:
    return RemoteTeacher({TEACHER_KEY: TeacherService(url=server.url, **changes)})


def test_each_token_has_its_log_prob_and_the_best_of_the_vocabulary(
    server: ChatServer,
) -> None:
    """Token 12 is behind the student's vocabulary, and no candidate."""
    rows, sources = rows_of([1, 7, 3], [2, 8]), ["sums", "words"]
    found = teacher(server, model="big").log_probs(rows, sources, TOP)
    assert found.log_probs.tolist() == [0, -7, -3, 0, -8]
    assert found.top_tokens is not None and found.top_log_probs is not None
    learned = [1, 2, 4]
    assert found.top_tokens[learned].tolist() == [[3, 5]] * 3
    assert found.top_log_probs[learned].tolist() == [[-3, -5]] * 3

    by_first = {call["prompt"][0]: call for call in server.calls}
    assert by_first[1] == {
        "model": "big", "prompt": [1, 7, 3], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2,
    }  # fmt: skip
    assert server.paths == {"/v1/completions"}


def test_a_place_may_have_fewer_candidates(server: ChatServer) -> None:
    found = teacher(server).log_probs(rows_of([1, 3]), ["sums"], TopTokens(2, 4))
    assert found.top_log_probs is not None
    assert found.top_log_probs[1].tolist() == [-3, -math.inf]


def test_a_row_that_is_not_learned_from_is_not_asked_about(server: ChatServer) -> None:
    rows = rows_of([1, 7, 3], [2, 8])
    rows = rows.replace(response_mask=rows.response_mask & (rows.row_of_token == 1))
    found = teacher(server).log_probs(rows, ["sums", "sums"], None)
    assert found.top_tokens is None
    assert found.log_probs.tolist() == [0, 0, 0, 0, -8]
    assert [call["prompt"] for call in server.calls] == [[2, 8]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {"error": "no model big"}), "POST .*/v1/completions: .*404.*no model big"),
        ((200, {"choices": []}), "in prompt_logprobs .IndexError"),
        ((200, {"choices": [{"prompt_logprobs": [None]}]}), "in prompt_logprobs .IndexError"),
        (
            (200, {"choices": [{"prompt_logprobs": [None, {"4": {"rank": 1, "logprob": -1.0}}]}]}),
            "KeyError: 7",
        ),
        ((200, {"choices": [{"prompt_logprobs": [None, {"7": -1.0}]}]}), "TypeError"),
    ],
)  # fmt: skip
def test_a_reply_without_log_probs_ends_the_call(
    server: ChatServer, answer: Answer, words: str
) -> None:
    server.behave = lambda _: answer
    with pytest.raises(ModelServiceError, match=words):
        teacher(server).log_probs(rows_of([1, 7]), ["sums"], TOP)


def test_a_server_that_is_away_is_waited_for_and_named(server: ChatServer) -> None:
    server.behave = lambda _: (503, {"error": "loading"})
    asking = teacher(server, max_outage_s=0.5)
    with pytest.raises(ModelServiceError, match=r"distill\.teacher\.max_outage_s"):
        asking.log_probs(rows_of([1, 7]), ["sums"], TOP)


def test_each_data_source_has_its_own_server(server: ChatServer) -> None:
    """The other server knows token 8 alone; both answer once all rows were sent."""
    all_are_sent = threading.Barrier(3, timeout=20)

    def scored_together(call: dict[str, Any]) -> Answer:
        all_are_sent.wait()
        return scored(call)

    def other_scores(call: dict[str, Any]) -> Answer:
        all_are_sent.wait()
        place = {"8": entry(1, -0.5)}
        return 200, {"choices": [{"prompt_logprobs": [None, *[place] * 2]}]}

    rows, sources = rows_of([1, 8], [2, 8, 8], [3, 8]), ["words", "sums", "letters"]
    with chat_server() as other:
        table = {"sums": server, "default": other}
        services = {
            f"{TEACHER_KEY}.{source}": TeacherService(url=each.url, max_outage_s=5)
            for source, each in table.items()
        }
        asking = RemoteTeacher(services)
        server.behave, other.behave = scored_together, other_scores
        found = asking.log_probs(rows, sources, TOP)
        assert found.log_probs.tolist() == [0, -0.5, 0, -8, -8, 0, -0.5]
        assert found.top_tokens is not None
        assert found.top_tokens[[1, 3, 6]].tolist() == [[8, 0], [3, 5], [8, 0]]

        server.behave, other.behave = scored, lambda _: (404, {"error": "no"})
        words = rf"distill\.teacher\.default: POST {other.url}/completions: .*404"
        with pytest.raises(ModelServiceError, match=words):
            asking.log_probs(rows, sources, TOP)
        server.behave = other.behave
        with pytest.raises(ConfigError) as refusal:
            asking.require(ServerNeeds("abc", [97, 98, 99], TOP, 8))
        keys = [f"{TEACHER_KEY}.{source}.url" for source in table]
        assert [problem.key for problem in refusal.value.problems] == keys

        del services[f"{TEACHER_KEY}.default"]
        with pytest.raises(
            ConfigError, match="no server for data source 'words' and 1 more"
        ):
            RemoteTeacher(services).log_probs(rows, sources, TOP)


def test_a_server_that_does_not_fit_is_refused_before_the_run(
    server: ChatServer,
) -> None:
    def characters(call: dict[str, Any]) -> Answer:
        if isinstance(call["prompt"], list):
            return scored(call)
        return 200, {"tokens": [*map(ord, call["prompt"])], "max_model_len": 9}

    server.behave = characters
    fits = ServerNeeds("abc", [97, 98, 99], TOP, 8)
    teacher(server).require(fits)
    assert server.paths == {"/tokenize", "/v1/completions"}
    assert server.calls[-1]["prompt_logprobs"] == 2

    for needs, words in (
        (ServerNeeds("abc", [7, 98, 99], TOP, 8), "has 3, first 97 for 7"),
        (ServerNeeds("abc", [97, 98, 99], TOP, 9), "takes 9 tokens, and a row may have 9"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words) as refusal:
            teacher(server).require(needs)
        assert refusal.value.problems[0].key == "distill.teacher.url"

    # What vLLM says where fewer log-probs are allowed than are asked for.
    server.behave = lambda call: (
        (400, {"message": "greater than max allowed: 1"})
        if isinstance(call["prompt"], list)
        else characters(call)
    )
    with pytest.raises(ConfigError, match=r"max allowed: 1.*\n.*--max-logprobs"):
        teacher(server).require(fits)
    server.behave = lambda _: (503, {"error": "loading"})
    with pytest.raises(ConfigError, match=r"distill\.teacher\.max_outage_s"):
        teacher(server, max_outage_s=0.5).require(fits)
