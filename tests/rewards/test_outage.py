"""A service that is away as a whole, and a request that fails by itself."""

from __future__ import annotations

import time

import pytest

from tests.rewards.services import (
    Items,
    Reply,
    Service,
    healths,
    items_of,
    lengths,
    scoring,
)
from verl_ray.errors import GraderOutage
from verl_ray.profiling.progress import progress
from verl_ray.rewards.health import Score, ScoreHealth

OK = Score(2.0, ScoreHealth.OK)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
def test_an_outage_costs_no_score(
    service: Service, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Batches of three tasks are in flight as it begins; none has an answer before."""
    waits: list[str] = []

    def away(number: int, items: Items) -> Reply:
        waits.append(progress().waits_for)
        return lengths(items) if number > 12 else Reply(b"busy", status=status)

    service.behave = away
    with scoring(service.url, max_attempts=2) as scorer:
        assert scorer.outage_s == 0.0
        began = time.monotonic()
        assert scorer.score(items_of(*["ab"] * 40)) == [OK] * 40
        # Three batches wait for one outage, which counts once.
        outage_s = scorer.outage_s
        assert 0 < outage_s < time.monotonic() - began
        assert scorer.score(items_of(*["ab"] * 40)) == [OK] * 40
        assert scorer.outage_s == outage_s
    begun, ended = capfd.readouterr().err.splitlines()
    name = f"warning: reward.url=http://127.0.0.1:{service.server_port}/score"
    assert begun.startswith(
        f"{name} is away: the service answered with status {status}"
    )
    assert begun.endswith("at most for reward.max_outage_s = 600 s")
    assert ended.startswith(f"{name} answers again after ")
    assert any(f"status {status}" in wait for wait in waits)
    assert progress().waits_for == ""


def test_the_limit_ends_the_wait_and_names_service_reply_and_key(
    service: Service,
) -> None:
    service.behave = lambda number, items: Reply(b"down", status=503)
    with scoring(service.url, max_outage_s=0.2) as scorer:
        for _ in range(2):
            with pytest.raises(GraderOutage) as caught:
                scorer.score(items_of(*"abcdefgh"))
        assert "secret" not in str(caught.value)
        assert "/score has not answered for" in str(caught.value)
        assert "(reward.max_outage_s = 0.2). The last reply: the service answered with" in str(
            caught.value
        )  # fmt: skip
        # It may come back later.
        service.behave = lambda number, items: lengths(items)
        assert scorer.score(items_of("ab")) == [OK]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("empty", [200, 422])
def test_one_batch_that_always_fails_is_no_outage(
    service: Service, concurrency: int, empty: int, capfd: pytest.CaptureFixture[str]
) -> None:
    waits: set[str] = set()

    def broken(number: int, items: Items) -> Reply:
        waits.add(progress().waits_for)
        if any(item["response"] == "bad" for item in items):
            return Reply(b"", status=500)
        return lengths(items) if items else Reply(b'{"scores": []}', status=empty)

    service.behave = broken
    changes = {"batch_size": 1, "concurrency": concurrency}
    with scoring(service.url, **changes) as scorer:
        # As the very first: nothing was answered that could be asked again.
        assert healths(scorer.score(items_of("bad"))) == [ScoreHealth.UNAVAILABLE]
        # The empty batch is sent after each of two rounds, of three attempts and one.
        assert service.sizes == [1, 1, 1, 0, 1, 0]
        scores = scorer.score(items_of("ab", "bad", "ab", "ab"))
        assert healths(scores) == [
            ScoreHealth.OK,
            ScoreHealth.UNAVAILABLE,
            ScoreHealth.OK,
            ScoreHealth.OK,
        ]
        # Alone, too: what was answered before is asked again.
        assert healths(scorer.score(items_of("bad"))) == [ScoreHealth.UNAVAILABLE]
    assert capfd.readouterr().err == ""
    # Who asks others whether they wait for a service hears of outages alone.
    assert waits == {""}


@pytest.mark.parametrize(
    ("url", "reply"),
    [("http://127.0.0.1:9", "no reply: Connect"), ("", "no reply within")],
)
def test_refused_connections_and_timeouts_are_waited_for(
    service: Service, url: str, reply: str
) -> None:
    service.behave = service.hang
    changes = {"request_timeout_s": 0.1, "max_attempts": 1, "max_outage_s": 0.3}
    with (
        scoring(url or service.url, **changes) as scorer,
        pytest.raises(GraderOutage, match=reply),
    ):
        scorer.score(items_of("ab"))
