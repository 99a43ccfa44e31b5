"""The scorer and a service that answers, rightly or wrongly: what becomes of each
entry, what is refused at the start, and the end. Servers and sockets are real.
"""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.rewards.services import (
    Items,
    Reply,
    Service,
    config,
    healths,
    items_of,
    lengths,
    scoring,
    until,
)
from verl_ray.errors import ConfigError, DataError, RewardError
from verl_ray.rewards.client import url_problem
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.remote import RemoteScorer
from verl_ray.rewards.request import ScoreRequest

# ------------------------------------------------------------------------------- scores


def test_scores_come_back_in_order_over_many_batches(service: Service) -> None:
    def later_ones_first(number: int, items: Items) -> Reply:
        # As many as may be in hand at a time wait for each other, however slowly they come.
        if number <= 3:
            until(lambda: service.most_busy >= 3)
        time.sleep(0.03 if number % 3 == 1 else 0.0)
        return lengths(items)

    service.behave = later_ones_first
    with scoring(service.url) as scorer:
        for _ in range(2):
            scores = scorer.score(items_of(*("x" * n for n in range(30))))
            assert [score.value for score in scores] == [float(n) for n in range(30)]
            assert {(score.health, score.detail) for score in scores} == {
                (ScoreHealth.OK, "")
            }
        assert scorer.score([]) == []
    assert sorted(service.sizes) == [2] * 2 + [4] * 14
    assert service.most_busy == 3


def test_every_field_arrives_and_any_text(service: Service) -> None:
    seen: Items = []

    def remember(number: int, items: Items) -> Reply:
        seen.extend(items)
        return lengths(items)

    service.behave = remember
    with scoring(service.url) as scorer:
        [score] = scorer.score(
            [ScoreRequest("ré\n\ud800", "a", "p", "maths", {"n": [1, {"m": None}]})]
        )
    assert score == Score(4.0, ScoreHealth.OK)
    assert seen == [
        {
            "response": "ré\n\ud800",
            "answer": "a",
            "prompt": "p",
            "data_source": "maths",
            "extra": {"n": [1, {"m": None}]},
        }
    ]


def test_connections_stay_open_between_calls(service: Service) -> None:
    with scoring(service.url, concurrency=1) as scorer:
        for _ in range(3):
            scorer.score(items_of(*"abcdefgh"))
    assert (len(service.arrived), service.connections) == (6, 1)


def test_an_extra_that_json_cannot_hold_is_refused_before_anything_is_sent(
    service: Service,
) -> None:
    with scoring(service.url) as scorer:
        with pytest.raises(
            DataError, match=r"extra of an item holds what JSON cannot .*object"
        ):
            scorer.score(
                [*items_of(*"abcdefgh"), ScoreRequest("", "", "", "", {"n": object()})]
            )
        assert service.arrived == []
        assert scorer.score(items_of("ab")) == [Score(2.0, ScoreHealth.OK)]


# ------------------------------------------------------------------------ wrong answers


@pytest.mark.parametrize(
    ("entry", "health", "detail"),
    [
        ("0", ScoreHealth.OK, ""),
        ("-1.5e2", ScoreHealth.OK, ""),
        ("null", ScoreHealth.NONE, "null"),
        ("NaN", ScoreHealth.NONFINITE, "nan"),
        ("-Infinity", ScoreHealth.NONFINITE, "-inf"),
        ('"NaN"', ScoreHealth.NONFINITE, "'NaN'"),
        ('"-Infinity"', ScoreHealth.NONFINITE, "'-Infinity'"),
        ("1e999", ScoreHealth.NONFINITE, "inf"),
        ("1e39", ScoreHealth.NONFINITE, "1e+39"),  # beyond 1e18
        (
            "9" * 5000,
            ScoreHealth.NONFINITE,
            "inf",
        ),  # more digits than Python makes an int of
        ("true", ScoreHealth.UNPARSED, "True"),
        ('"1.0"', ScoreHealth.UNPARSED, "'1.0'"),
        ('"' + "long " * 1000 + '"', ScoreHealth.UNPARSED, "'long long"),
        (r'"\ud800"', ScoreHealth.UNPARSED, r"\ud800"),
        ("[1.0]", ScoreHealth.UNPARSED, "[1.0]"),
        ("[" * 900 + "]" * 900, ScoreHealth.UNPARSED, "[[["),
        ('{"score": 1.0}', ScoreHealth.UNPARSED, "{'score': 1.0}"),
    ],
)
def test_a_wrong_entry_costs_its_own_score_only(
    service: Service, entry: str, health: ScoreHealth, detail: str
) -> None:
    service.behave = lambda number, items: Reply(
        f'{{"scores": [1, {entry}, 3]}}'.encode()
    )
    with scoring(service.url) as scorer:
        scores = scorer.score(items_of("a", "b", "c"))
    assert healths(scores) == [ScoreHealth.OK, health, ScoreHealth.OK]
    assert (scores[0].value, scores[2].value) == (1.0, 3.0)
    assert detail in scores[1].detail
    assert len(scores[1].detail) < 300
    scores[1].detail.encode()
    assert len(service.arrived) == 1


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        (Reply(b'{"scores": [1, 2]}'), "with 3 entries, found 2"),
        (Reply(b'{"scores": [1, 2, 3, 4]}'), "with 3 entries, found 4"),
        (Reply(b'{"score": [1, 2, 3]}'), """found '{"score": [1, 2, 3]}'"""),
        (Reply(b'{"scores": 1}'), """found '{"scores": 1}'"""),
        (Reply(b'{"scores": {"0": 1}}'), "expected"),
        (Reply(b"[1, 2, 3]"), "found '[1, 2, 3]'"),
        (Reply(b"null"), "found 'null'"),
        (Reply(b""), "not JSON"),
        (
            Reply(b"<html>" + b"x" * 10_000),
            "not JSON (Expecting value: line 1 column 1 (char 0)): '<html>xxx",
        ),
        (Reply(b"\xff\xfe\xfd"), "not JSON"),
        (Reply(b"[" * 100_000), "not JSON"),
        (Reply(b"", status=204), "not JSON"),
        (
            Reply(b"no gzip", headers={"Content-Encoding": "gzip"}),
            "cannot be decompressed",
        ),
        (
            Reply(
                gzip.compress(b" " * (1 << 25)), headers={"Content-Encoding": "gzip"}
            ),
            "longer than 16777216 bytes",
        ),
        (
            Reply(b" " * (1 << 16), headers={"Content-Length": "9" * 15}, endless=True),
            "longer than 16777216 bytes",
        ),
    ],
)
def test_an_answer_of_the_wrong_shape_costs_its_batch_and_is_not_asked_for_again(
    service: Service, reply: Reply, detail: str
) -> None:
    service.behave = lambda number, items: reply if number == 1 else lengths(items)
    with scoring(service.url, batch_size=3, concurrency=1) as scorer:
        scores = scorer.score(items_of("a", "b", "c", "dd"))
    assert healths(scores) == [ScoreHealth.UNPARSED] * 3 + [ScoreHealth.OK]
    assert detail in scores[0].detail
    assert len(scores[0].detail) < 400
    assert len(service.arrived) == 2


# ------------------------------------------------------------------------ start and end


def test_the_token_arrives(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_TOKEN", "s3cret")
    for token_env in ("GRADER_TOKEN", None):
        with scoring(service.url, token_env=token_env) as scorer:
            scorer.score(items_of("a"))
    assert [headers.get("Authorization") for headers in service.headers] == [
        "Bearer s3cret",
        None,
    ]
    assert service.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize("token", [None, "", "s3cret\n", "s3cré", "s3 cret"])
def test_a_token_that_cannot_be_sent_is_refused(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADER_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("GRADER_TOKEN", token)
    with pytest.raises(ConfigError) as error:
        RemoteScorer(config("http://host", token_env="GRADER_TOKEN"))
    [problem] = error.value.problems
    assert (problem.key, problem.value) == ("reward.token_env", "GRADER_TOKEN")
    assert "s3c" not in str(problem)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("grader:8000/score", "does not begin with http"),
        ("ftp://host/score", "does not begin with http"),
        ("", "does not begin with http"),
        ("http://", "names no host"),
        ("http:///score", "names no host"),
        ("http://:8000/score", "names no host"),
        ("http://host:0", "no port that can be reached"),
        ("http://host:70000", "is no URL: Port out of range"),
        ("http://host:port", "is no URL"),
        ("http://[::1", "is no URL"),
        ("http://my host/score", "white space"),
        ("http://host/score\n", "white space"),
    ],
)
def test_what_is_no_url_is_refused(url: str, rule: str) -> None:
    problem = url_problem(url, "reward.components.service.url")
    assert problem is not None
    assert (problem.key, problem.value) == ("reward.components.service.url", url)
    assert rule in problem.rule
    with pytest.raises(ConfigError, match=r"reward\.url"):
        RemoteScorer(config(url))


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "https://host:8000/score?model=a",
        "HTTP://127.0.0.1:1/",
        "http://[::1]:80",
    ],
)
def test_urls(url: str) -> None:
    assert url_problem(url, "reward.url") is None
    RemoteScorer(config(url)).close()


def test_a_host_name_that_only_the_client_refuses() -> None:
    url = "http://999.1.1.1/score"
    assert url_problem(url, "reward.url") is None
    with pytest.raises(
        ConfigError,
        match=r"reward\.components\.x\.url = http://999\.1\.1\.1/score\n.*rule: is no URL",
    ):
        RemoteScorer(config(url), key="reward.components.x")


@pytest.mark.parametrize(
    "url", ["http://me:s3cret@host/score", "http://me:s3cret@host:70000/score"]
)
def test_a_password_in_the_url_is_refused_and_not_shown(url: str) -> None:
    problem = url_problem(url, "reward.url")
    assert problem is not None
    assert "***@host" in str(problem)
    assert "s3cret" not in str(problem)


@pytest.mark.processes
def test_checking_a_url_imports_no_client() -> None:
    program = (
        "import sys; from verl_ray.rewards.client import url_problem; url_problem('http://host', 'reward.url');"
        "print([name for name in ('httpx', 'torch', 'ray', 'numpy') if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, check=True
        ).stdout
        == b"[]\n"
    )


def test_close_may_be_called_twice_and_ends_the_scorer(service: Service) -> None:
    scorer = RemoteScorer(config(service.url))
    scorer.score(items_of("a"))
    scorer.close()
    scorer.close()
    with pytest.raises(RewardError, match="closed"):
        scorer.score(items_of("a"))
    RemoteScorer(config(service.url)).close()


def test_ctrl_c_ends_the_requests_under_way_and_closes_the_scorer(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    def press_when_busy() -> None:
        until(lambda: service.busy == 2)
        os.kill(os.getpid(), signal.SIGINT)

    service.behave = service.hang
    scorer = RemoteScorer(config(service.url))
    finger = threading.Thread(target=press_when_busy)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a command in an earlier test has its own
    try:
        finger.start()
        with pytest.raises(KeyboardInterrupt):
            scorer.score(items_of(*"abcdefgh"))
        finger.join()
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(RewardError, match="closed"):
        scorer.score([])
    assert capfd.readouterr().err == ""
