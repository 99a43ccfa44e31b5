"""Fields of a call that are honoured, that change nothing, or that are refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from verl_ray.errors import CallRefused
from verl_ray.rollout.openai_api import (
    NEUTRAL_VALUES,
    WITHOUT_EFFECT,
    ApiCall,
    ChatCall,
    ChoiceDelta,
    CompletionCall,
    read_call,
)

USER = {"role": "user", "content": "1"}


def test_what_is_left_out_or_null_is_as_openai_has_it() -> None:
    call = read_call(
        CompletionCall,
        {"prompt": "1", "temperature": None, "stop": None, "logit_bias": None},
    )
    assert call == CompletionCall(prompt="1")  # type: ignore[arg-type]
    assert (call.prompt, call.n, call.temperature, call.top_p, call.max_tokens) == (
        ["1"],
        1,
        1.0,
        1.0,
        None,
    )
    assert (call.stop, call.stream, call.logprobs, call.seed) == ([], False, None, None)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([3, 4], [[3, 4]]),
        ([[3, 4], "ab"], [[3, 4], "ab"]),
    ],
)
def test_a_prompt_is_a_text_or_tokens_or_several(
    given: object, prompts: list[object]
) -> None:
    assert read_call(CompletionCall, {"prompt": given}).prompt == prompts


def test_messages_are_of_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {
        "role": "assistant",
        "content": "2",
        "refusal": None,
        "tool_calls": None,
    }  # as a client gives it back
    call = read_call(
        ChatCall,
        {"messages": [{"role": "user", "content": parts}, answer], "stop": "x"},
    )
    assert call.messages == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "2"},
    ]
    assert call.stop == ["x"]


def test_fields_that_ask_for_nothing_are_no_fields() -> None:
    plain = read_call(ChatCall, {"messages": [USER]})
    for name in WITHOUT_EFFECT:
        assert read_call(ChatCall, {"messages": [USER], name: "anything"}) == plain
    for name, values in NEUTRAL_VALUES.items():
        for value in values:
            assert read_call(ChatCall, {"messages": [USER], name: value}) == plain
        with pytest.raises(
            CallRefused,
            match=rf"{name} = 'other': this endpoint does not support it; leave it out",
        ):
            read_call(ChatCall, {"messages": [USER], name: "other"})
    known = {*CompletionCall.model_fields, *ChatCall.model_fields}
    assert (
        not known & WITHOUT_EFFECT
        and not known & NEUTRAL_VALUES.keys()
        and not WITHOUT_EFFECT & NEUTRAL_VALUES.keys()
    )


REFUSED: list[tuple[type[ApiCall], dict[str, Any], str, str]] = [
    (CompletionCall, {}, "prompt", "prompt is missing"),
    (CompletionCall, {"prompt": ""}, "prompt", "expected a text, a list of token ids"),
    (CompletionCall, {"prompt": []}, "prompt", "expected a text, a list of token ids"),
    (CompletionCall, {"prompt": [3, -1]}, "prompt", "expected a text, a list of token ids"),
    (CompletionCall, {"prompt": [3, True]}, "prompt", "expected a text, a list of token ids"),
    (CompletionCall, {"prompt": ["a", ""]}, "prompt", "expected a text, a list of token ids"),
    (CompletionCall, {"prompt": "1", "messages": [USER]}, "messages", "does not support it"),
    (CompletionCall, {"prompt": "1", "logprobs": 5}, "logprobs", "logprobs = 5: Input should be 0 or 1"),
    (CompletionCall, {"prompt": "1", "temperature": 0.001}, "temperature", "expected 0, which is greedy, or at"),
    (CompletionCall, {"prompt": "1", "temperature": 2.5}, "temperature", "less than or equal to 2"),
    (CompletionCall, {"prompt": "1", "temperature": float("nan")}, "temperature", "finite"),
    (CompletionCall, {"prompt": "1", "top_p": 0}, "top_p", "greater than 0"),
    (CompletionCall, {"prompt": "1", "seed": -1}, "seed", "greater than or equal to 0"),
    (CompletionCall, {"prompt": "1", "n": 0}, "n", "greater than or equal to 1"),
    (CompletionCall, {"prompt": "1", "n": "2"}, "n", "n = '2': Input should be a valid integer"),
    (CompletionCall, {"prompt": "1", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (CompletionCall, {"prompt": "1", "stop": ["a", ""]}, "stop", "at least 1 character"),
    (CompletionCall, {"prompt": "1", "stream_options": {"x": 1}}, "stream_options", "Extra inputs"),
    (CompletionCall, {"prompt": "1" * 200, "foo": 1}, "foo", "foo = 1: this endpoint does not support it"),
    (ChatCall, {"messages": []}, "messages", "expected a list of messages"),
    (ChatCall, {"messages": "1"}, "messages", "expected a list of messages"),
    (ChatCall, {"messages": [{"role": "user"}]}, "messages", "role and content, which are texts"),
    (ChatCall, {"messages": [USER | {"name": "Ann"}]}, "messages", "role and content, which are texts"),
    (ChatCall, {"messages": [USER | {"content": [{"type": "image_url"}]}]}, "messages", "role and content"),
    (ChatCall, {"messages": [USER], "logprobs": 1}, "logprobs", "valid boolean"),
    (ChatCall, {"messages": [USER], "top_logprobs": 3}, "top_logprobs", "does not support it"),
    (ChatCall, {"messages": [USER], "tools": [{"type": "function"}]}, "tools", "does not support it"),
    (ChatCall, {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format", "not support it"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "param", "message"), REFUSED, ids=str)
def test_a_field_is_refused_by_its_name(
    kind: type[ApiCall], body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(CallRefused, match=message) as refused:
        read_call(kind, body)
    assert (refused.value.param, refused.value.status) == (param, 400)
    assert len(str(refused.value)) < 400
    again = pickle.loads(pickle.dumps(refused.value))
    assert (str(again), again.param, again.status) == (str(refused.value), param, 400)


def test_the_parts_of_a_choice_join() -> None:
    first = ChoiceDelta(2, 0, "ab", [5, 6], [-0.5, -1.0], ((0, 3), (1, 4)), None)
    last = ChoiceDelta(2, 2, "c", [7], [-2.0], ((2, 4),), "length")
    assert ChoiceDelta.join([first, last]) == ChoiceDelta(
        2, 0, "abc", [5, 6, 7], [-0.5, -1.0, -2.0], ((0, 3), (1, 4)), "length"
    )
