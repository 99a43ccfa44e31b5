"""What a judge is asked and how its answer is read, on texts written by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from scripts.configuration import compose
from verl_ray.config.reward import JudgeReward
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.judge import Judgement
from verl_ray.rewards.request import ScoreRequest

REQUEST = ScoreRequest(
    response="It is {{ answer }} & <7>.",
    answer="12",
    prompt="5+7?",
    data_source="sums",
    extra={"hint": "carry", "n": 2},
)


@cache
def shipped() -> JudgeReward:
    """The one that `reward=judge` is."""
    config = compose(
        "quickstart", ["reward=judge", "reward.model.path=/judge", "prepare.min_gain=0"]
    )
    assert isinstance(config, RLConfig) and isinstance(config.reward, JudgeReward)
    return config.reward


def judge(**changes: object) -> JudgeReward:
    return shipped().model_copy(update=changes)


def asked(template: str, request: ScoreRequest = REQUEST) -> str | Score:
    return Judgement(judge(template=template)).question(request)


# ------------------------------------------------------------------------- the question


def test_a_question_is_the_template_with_the_response_as_it_is() -> None:
    template = "{{ data_source }}|{{ prompt }}|{{ response }}|{{ answer }}|{{ extra.hint }}|{{ extra['n'] + 1 }}"
    # Neither escaped for HTML, nor read as a template itself.
    assert asked(template) == "sums|5+7?|It is {{ answer }} & <7>.|12|carry|3"


def test_the_question_of_the_shipped_template() -> None:
    question = Judgement(judge()).question(replace(REQUEST, response="12"))
    assert isinstance(question, str)
    head, _, tail = question.partition("Say briefly")
    assert (
        head
        == "You grade an answer.\n\nQuestion: 5+7?\n\nAnswer to grade: 12\nCorrect answer: 12\n"
    )
    assert '"Score: N"' in tail and tail.endswith("10 (right in every respect).")
    unknown = replace(REQUEST, response="12", answer=None)
    without = Judgement(judge()).question(unknown)
    assert question.replace("Correct answer: 12\n", "") == without


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ response }} {{ extra.missing }}", "has no attribute 'missing'"),
        (
            "{{ response }} {{ extra.hint + 1 }}",
            'can only concatenate str (not "int") to str',
        ),
        ("{{ response }} {{ 1 / (extra.n - 2) }}", "division by zero"),
        ("{{ response.__class__.__mro__ }}", "is unsafe"),
        ("{{ response }} {% include 'other' %}", "no loader"),
    ],
)
def test_a_template_that_fails_on_a_response_is_a_failed_score(
    template: str, says: str
) -> None:
    failed = asked(template)
    assert isinstance(failed, Score)
    assert math.isnan(failed.value) and failed.health is ScoreHealth.EXCEPTION
    assert (
        failed.detail.startswith("the judge's template fails on this response: ")
        and says in failed.detail
    )


# -------------------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Right. Score: 7", 7.0),
        ("score:7.25.", 7.25),
        ("Score: 3 would be harsh. Score: 8\nDone.", 8.0),  # the last one counts
        ("Score: 0", 0.0),
        ("Score: 10", 10.0),
    ],
)
def test_the_last_verdict_is_the_score(answer: str, score: float) -> None:
    assert Judgement(judge()).verdict(answer, cut=False) == Score(score, ScoreHealth.OK)


def test_a_verdict_beyond_the_largest_score_is_none() -> None:
    wide = judge().model_copy(update={"verdict": r"score: *(\S+)", "highest": 1e300})
    verdict = Judgement(wide).verdict("score: 1e39", cut=False)
    assert verdict.health is ScoreHealth.NONFINITE
    assert "the judge's verdict is 1e+39, beyond 1e18" in verdict.detail


@pytest.mark.parametrize(
    ("pattern", "answer", "cut", "says"),
    [
        (None, "", False, "no verdict in the judge's reply: ...''"),
        (
            None,
            "I would say seven.",
            False,
            "no verdict in the judge's reply: ...'I would say seven.'",
        ),
        (None, "Score: 11", False, "the judge's verdict is 11, outside of 0 to 10"),
        (
            None,
            "Score: 7. No, score: 70",
            False,
            "the judge's verdict is 70, outside of 0 to 10",
        ),  # not the 7 either
        (
            r"score: *(\S+)",
            "score: -1",
            False,
            "the judge's verdict is -1, outside of 0 to 10",
        ),
        (
            r"score: *(\S+)",
            "score: nan",
            False,
            "the judge's verdict is nan, outside of 0 to 10",
        ),
        (
            r"score: *(\S+)",
            "score: inf",
            False,
            "the judge's verdict is inf, outside of 0 to 10",
        ),
        (
            r"score: *(\S+)",
            "score: 3 score: 7/10",
            False,
            "the judge's verdict is no number: 'score: 7/10'",
        ),
        (
            r"score:(?: *(\d))?",
            "so the score: ?",
            False,
            "the judge's verdict is no number: 'score:'",
        ),
        (
            None,
            "Score: 1",
            True,
            "the judge's reply was cut in its verdict: ...'Score: 1'",
        ),  # of 10, perhaps
    ],
)
def test_what_is_no_verdict_is_a_failed_score(
    pattern: str | None, answer: str, cut: bool, says: str
) -> None:
    failed = Judgement(
        judge(**({} if pattern is None else {"verdict": pattern}))
    ).verdict(answer, cut=cut)
    assert math.isnan(failed.value)
    assert (failed.health, failed.detail) == (ScoreHealth.UNPARSED, says)


def test_a_verdict_before_the_cut_counts() -> None:
    assert Judgement(judge()).verdict("Score: 1 since", cut=True) == Score(
        1.0, ScoreHealth.OK
    )


def test_a_long_answer_is_shown_from_its_end() -> None:
    failed = Judgement(judge()).verdict("x" * 300 + "the end", cut=False)
    assert failed.detail == f"no verdict in the judge's reply: ...'{'x' * 193}the end'"
