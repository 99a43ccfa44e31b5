"""The circuit breaker: when nothing is sent any more, and when it is again. The service
is real.
"""

from __future__ import annotations

import pytest

from tests.rewards.services import (
    Items,
    Reply,
    Service,
    healths,
    items_of,
    lengths,
    scoring,
    until,
)
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.remote import RemoteScorer


def let_reset_pass(scorer: RemoteScorer) -> None:
    """Make it as late as if reward.circuit_reset_s had passed."""
    assert scorer._circuit._trial_at is not None
    scorer._circuit._trial_at = 0.0


def test_the_circuit_opens_and_closes_again(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    service.behave = lambda number, items: Reply(b"", status=500)
    changes = {"circuit_failures": 3, "max_attempts": 2, "concurrency": 1}
    with scoring(service.url, **changes) as scorer:
        scores = scorer.score(items_of(*["ab"] * 40))  # ten batches
        assert healths(scores) == [ScoreHealth.UNAVAILABLE] * 40
        assert len(service.arrived) == 3 * 2
        assert "status 500" in scores[11].detail
        assert (
            "not sent: the circuit is open after 3 failed batches in a row, the last: the service"
            in scores[12].detail
        )
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith(
            f"warning: reward.url=http://127.0.0.1:{service.server_port}/score: the circuit is open"
        )
        assert "secret" not in line

        let_reset_pass(scorer)
        assert (
            healths(scorer.score(items_of(*["ab"] * 40)))
            == [ScoreHealth.UNAVAILABLE] * 40
        )
        assert len(service.arrived) == 4 * 2  # one trial
        assert capfd.readouterr().err == ""

        service.behave = lambda number, items: lengths(items)
        assert healths(scorer.score(items_of("ab"))) == [
            ScoreHealth.UNAVAILABLE
        ]  # open for as long again
        let_reset_pass(scorer)
        assert scorer.score(items_of(*["ab"] * 40)) == [Score(2.0, ScoreHealth.OK)] * 40
        assert len(service.arrived) == 4 * 2 + 10
        [line] = capfd.readouterr().err.splitlines()
        assert line.endswith("/score: replies again, the circuit is closed")

        service.behave = lambda number, items: Reply(b"", status=500)
        scorer.score(items_of(*["ab"] * 40))
        assert len(service.arrived) == 4 * 2 + 10 + 3 * 2  # counted from nothing again


def test_batches_wait_for_the_trial_and_none_is_repeated_into_an_open_circuit(
    service: Service,
) -> None:
    def fail_late(number: int, items: Items) -> Reply:
        until(lambda: len(service.arrived) >= 3)  # all that may be in flight
        return Reply(b"", status=500)

    service.behave = fail_late
    changes = {"circuit_failures": 1, "max_attempts": 1, "batch_size": 1}
    with scoring(service.url, **changes) as scorer:
        assert (
            healths(scorer.score(items_of(*"abcdef"))) == [ScoreHealth.UNAVAILABLE] * 6
        )
        assert len(service.arrived) == 3  # those in flight when the first failed
        let_reset_pass(scorer)
        assert (
            healths(scorer.score(items_of(*"abcdef"))) == [ScoreHealth.UNAVAILABLE] * 6
        )
        assert len(service.arrived) == 4
    service.arrived.clear()

    def fail_when_open(number: int, items: Items) -> Reply:
        if items[0]["response"] == "a":
            return Reply(b"", status=404)
        until(lambda: scorer._circuit.era == 1)
        return Reply(b"", status=500)

    service.behave = fail_when_open
    with scoring(
        service.url, **changes | {"max_attempts": 50, "concurrency": 2}
    ) as scorer:
        assert healths(scorer.score(items_of(*"ba"))) == [ScoreHealth.UNAVAILABLE] * 2
    assert len(service.arrived) == 2


def test_an_answer_to_what_was_sent_before_the_circuit_opened_does_not_close_it(
    service: Service,
) -> None:
    def late_or_broken(number: int, items: Items) -> Reply:
        if items[0]["response"] == "broken":
            until(lambda: len(service.arrived) == 2)
            return Reply(b"", status=404)
        until(lambda: scorer._circuit.era == 1)
        return lengths(items)

    service.behave = late_or_broken
    with scoring(service.url, circuit_failures=1, batch_size=1) as scorer:
        assert healths(scorer.score(items_of("late", "broken"))) == [
            ScoreHealth.OK,
            ScoreHealth.UNAVAILABLE,
        ]
        assert healths(scorer.score(items_of("late"))) == [ScoreHealth.UNAVAILABLE]
    assert len(service.arrived) == 2


def test_an_answer_between_failures_keeps_the_circuit_closed(service: Service) -> None:
    service.behave = lambda number, items: (
        Reply(b"", status=404) if number % 3 else lengths(items)
    )
    with scoring(
        service.url, circuit_failures=3, concurrency=1, batch_size=1
    ) as scorer:
        scores = scorer.score(items_of(*["ab"] * 9))
    assert (
        healths(scores)
        == [ScoreHealth.UNAVAILABLE, ScoreHealth.UNAVAILABLE, ScoreHealth.OK] * 3
    )
    assert len(service.arrived) == 9


@pytest.mark.parametrize(
    ("body", "requests"),
    [
        (b"[]", 2),
        (b'{"scores": ["no", true]}', 2),
        (b'{"scores": ["no", 1]}', 5),
        (b'{"scores": [null, null]}', 5),
        (b'{"scores": [NaN, NaN]}', 5),
    ],
)
def test_a_batch_without_any_answer_counts_for_the_circuit(
    service: Service, body: bytes, requests: int
) -> None:
    service.behave = lambda number, items: Reply(body)
    with scoring(
        service.url, circuit_failures=2, concurrency=1, batch_size=2
    ) as scorer:
        scorer.score(items_of(*["ab"] * 10))
    assert len(service.arrived) == requests
