"""Which style a signature has, which values it gets, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from verl_ray.rewards.arguments import GroupLog, group_values, response_values
from verl_ray.rewards.request import ScoreRequest
from verl_ray.rewards.signatures import (
    MissingValue,
    SignatureMistake,
    Style,
    signature_of,
)

REQUEST = ScoreRequest(
    response="4",
    answer="5",
    prompt="2+3=",
    data_source="sums",
    extra={"level": 2, "reward_model": {"ground_truth": ["5", "five"]}},
    num_tokens=2,
    finish_reason="length",
    step=7,
    tokens=[6, 1],
    conversation=[{"role": "user", "content": "2+3="}],
)
OURS = {
    "response": "4",
    "answer": "5",
    "prompt": "2+3=",
    "data_source": "sums",
    "extra": REQUEST.extra,
    "num_tokens": 2,
    "finish_reason": "length",
    "step": 7,
}


def call(function: Callable[..., Any], request: ScoreRequest = REQUEST) -> Any:
    """The result of a function that returns its arguments."""
    by_place, by_name = signature_of(function).bind(response_values(request))
    return function(*by_place, **by_name)


def everything(**values: Any) -> dict[str, Any]:
    return values


class Instance:
    def __call__(self, step: int, response: str) -> tuple[int, str]:
        return step, response


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda response, answer: (response, answer), ("4", "5")),
        (lambda answer, response, /: (answer, response), ("5", "4")),
        (lambda text, truth, /, *, prompt: (text, truth, prompt), ("4", "5", "2+3=")),
        (lambda step, num_tokens, finish_reason: (step, num_tokens, finish_reason), (7, 2, "length")),
        (lambda response, scale=3: (response, scale), ("4", 3)),
        (everything, OURS),
        (Instance(), (7, "4")),
        (partial(lambda scale, response: (scale, response), 3), (3, "4")),
    ],
)  # fmt: skip
def test_a_function_of_ours_gets_what_it_names(
    function: Callable[..., Any], arguments: Any
) -> None:
    assert signature_of(function).style is Style.OURS
    assert call(function) == arguments


def test_a_function_of_verl_gets_the_raw_ground_truth() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any,
        extra_info: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        return data_source, solution_str, ground_truth, extra_info["level"], more

    assert signature_of(compute_score).style is Style.VERL
    assert call(compute_score) == ("sums", "4", ["5", "five"], 2, {})
    plain = ScoreRequest("4", "5", "", "sums", {"level": 1})
    assert call(compute_score, plain) == ("sums", "4", "5", 1, {})


def test_a_batched_function_gets_the_columns_of_its_group() -> None:
    def named(completions, level, trainer_state, hint="none", **more):  # type: ignore[no-untyped-def]
        return completions, level, trainer_state.global_step, hint, sorted(more)

    other = ScoreRequest("6", "5", "2+3=", "sums", REQUEST.extra, tokens=[8, 1],
                         conversation=REQUEST.conversation)  # fmt: skip
    log = GroupLog(2)
    signature = signature_of(named)
    _, by_name = signature.bind(group_values([REQUEST, other], log))
    completions, *others, more = named(**by_name)
    assert completions == [[{"role": "assistant", "content": text}] for text in "46"]
    assert others == [[2, 2], 7, "none"]
    assert more == [
        "answer", "completion_ids", "data_source", "finish_reason", "log_extra", "log_metric", "num_tokens",
        "prompts", "reward_model", "step",
    ]  # fmt: skip
    assert by_name["completion_ids"] == [[6, 1], [8, 1]]
    assert (by_name["step"], len(by_name["num_tokens"])) == (7, 2)
    assert by_name["answer"] == ["5", "5"]
    assert by_name["prompts"] == [REQUEST.conversation] * 2

    by_name["log_extra"]("length", [1, 2])
    by_name["log_metric"]("rate", 0.5)
    assert log.entries == [{"length": 1, "rate": 0.5}, {"length": 2, "rate": 0.5}]
    with pytest.raises(ValueError, match=r"log_extra\('n'\) got 1 values for 2"):
        by_name["log_extra"]("n", [1])

    # Prompts that are texts have completions that are texts.
    text = ScoreRequest("4", None, "2+3=", "sums", {}, conversation="2+3=")
    values = group_values([text], log)
    assert (values["prompts"], values["completions"]) == (["2+3="], ["4"])
    assert signature_of(lambda completion_ids: []).style is Style.TRL


def test_a_value_that_the_record_lacks_is_named() -> None:
    without = ScoreRequest("4", None, "", "sums", {"level": 1})
    for function, name in (
        (lambda response, answer: 0, "answer"),
        (lambda solution_str, ground_truth: 0, "ground_truth"),
    ):
        with pytest.raises(MissingValue, match=rf"no answer, .* {name}=None") as error:
            call(function, without)
        assert "data.columns={answer: NAME}" in str(error.value)
    assert call(lambda response, answer="none": answer, without) == "none"
    assert "answer" not in call(everything, without)

    batched = signature_of(lambda completions, solution: [])
    with pytest.raises(
        MissingValue, match=r"no column 'solution'.* data_source, level"
    ):
        batched.bind(group_values([without], GroupLog(1)))


@pytest.mark.parametrize(
    ("function", "rule", "fix"),
    [
        (lambda response, answr: 0, "its parameter 'answr' has no default", "answer?"),
        (lambda solution_str, truth: 0, "its parameter 'truth'", "ground_truth"),
        (lambda a, b, c, /: 0, "its parameter 'c'", "response"),
        (3, "is a int, which cannot be called", "a function or a class"),
    ],
)
def test_what_cannot_be_a_reward_function(function: Any, rule: str, fix: str) -> None:
    with pytest.raises(SignatureMistake) as error:
        signature_of(function)
    assert rule in error.value.rule and fix in error.value.fix
