"""The scorer against a service that fails, is slow or is gone: attempts, waits,
deadlines, the rate. Servers, sockets and processes are real.
"""

from __future__ import annotations

import contextlib
import email.utils
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.rewards.services import (
    Items,
    Reply,
    Service,
    config,
    items_of,
    lengths,
    scoring,
)
from verl_ray.errors import GraderOutage
from verl_ray.rewards.client import ServiceClient
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.remote import RemoteScorer

AT_ONCE_S = 1e-3
"""Limit of an outage that is over once it is known."""

# -------------------------------------------------------------------- failures, retries


def test_500_twice_then_success(service: Service) -> None:
    service.behave = lambda number, items: (
        Reply(b"", status=500) if number <= 2 else lengths(items)
    )
    with scoring(service.url) as scorer:
        assert scorer.score(items_of("ab", "c")) == [
            Score(2.0, ScoreHealth.OK),
            Score(1.0, ScoreHealth.OK),
        ]
    assert len(service.arrived) == 3


def test_waits_between_attempts_double(service: Service, waits: list[float]) -> None:
    service.behave = lambda number, items: Reply(b"over capacity", status=503)
    changes = {"backoff_s": 0.05, "max_attempts": 5, "max_outage_s": AT_ONCE_S}
    with (
        scoring(service.url, **changes) as scorer,
        pytest.raises(GraderOutage, match="answered with status 503: 'over capacity'"),
    ):
        scorer.score(items_of("a"))
    assert len(service.arrived) == 5 + 1
    for wait_s, backoff_s in zip(waits, [0.05, 0.1, 0.2, 0.4], strict=True):
        assert 0.5 * backoff_s <= wait_s <= 1.5 * backoff_s  # the jitter


@pytest.mark.parametrize("as_date", [False, True])
def test_429_is_asked_again_when_the_service_says(
    service: Service, waits: list[float], as_date: bool
) -> None:
    def limited(number: int, items: Items) -> Reply:
        when = email.utils.formatdate(time.time() + 3, usegmt=True) if as_date else "1"
        return (
            Reply(b"", status=429, headers={"Retry-After": when})
            if number == 1
            else lengths(items)
        )

    service.behave = limited
    with scoring(service.url) as scorer:
        assert scorer.score(items_of("ab")) == [Score(2.0, ScoreHealth.OK)]
    (wait_s,) = waits
    # A date has whole seconds, so 2 to 3 are left of it when it is sent; the backoff
    # alone would be 0.015.
    assert (0.02 < wait_s <= 3) if as_date else wait_s == 1


@pytest.mark.parametrize("when", ["120", "9" * 500, "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_retry_beyond_the_deadline_is_not_waited_for(
    service: Service, waits: list[float], when: str
) -> None:
    service.behave = lambda number, items: Reply(
        b"", status=429, headers={"Retry-After": when}
    )
    with (
        scoring(service.url, deadline_s=120.0, max_outage_s=AT_ONCE_S) as scorer,
        pytest.raises(GraderOutage, match="status 429"),
    ):
        scorer.score(items_of("ab"))
    assert waits == [] and len(service.arrived) == 1 + 1


@pytest.mark.parametrize(
    "when", ["soon", "-5", "nan", "", "Fri, 31 Dec 99999 23:59:59 GMT", "\u00b2"]
)
def test_a_retry_after_that_says_nothing_leaves_the_backoff(
    service: Service, when: str
) -> None:
    limited = Reply(b"", status=429, headers={"Retry-After": when})
    service.behave = lambda number, items: limited if number == 1 else lengths(items)
    with scoring(service.url) as scorer:
        assert scorer.score(items_of("ab")) == [Score(2.0, ScoreHealth.OK)]


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        (
            Reply(b'{"detail": "Not Found"}', status=404),
            """status 404: '{"detail": "Not Found"}'""",
        ),
        (Reply(b"", status=401), "status 401"),
        (
            Reply(b"", status=307, headers={"Location": "/score/"}),
            "status 307, go to '/score/'",
        ),
    ],
)
def test_a_refusal_is_not_asked_again(
    service: Service, reply: Reply, detail: str
) -> None:
    service.behave = lambda number, items: reply
    with scoring(service.url) as scorer:
        [score] = scorer.score(items_of("a"))
    assert score.health is ScoreHealth.UNAVAILABLE
    assert detail in score.detail
    assert "attempt" not in score.detail
    assert len(service.arrived) == 1


def test_a_slow_service_costs_the_deadline_alone(service: Service) -> None:
    """A request may take 1 s and a batch 2.5 s, so the third attempt of the hundred is
    the last one.
    """
    service.behave = service.hang
    changes = {"request_timeout_s": 1.0, "deadline_s": 2.5, "max_attempts": 100}
    with scoring(service.url, **changes, max_outage_s=AT_ONCE_S) as scorer:
        with pytest.raises(GraderOutage, match="no reply within 1 s"):
            scorer.score(items_of(*"abcdefgh"))  # two batches, in flight together
        assert len(service.arrived) <= 2 * 3 + 1
        service.behave = lambda number, items: lengths(items)
        assert (
            scorer.score(items_of(*["ab"] * 24)) == [Score(2.0, ScoreHealth.OK)] * 24
        )  # no connection was lost for good


def test_the_deadline_cuts_a_request_short(service: Service) -> None:
    service.behave = service.hang
    changes = {"request_timeout_s": 600.0, "deadline_s": 1.0}
    with (
        scoring(service.url, **changes, max_outage_s=AT_ONCE_S) as scorer,
        pytest.raises(GraderOutage, match="no reply within 1 s"),
    ):
        scorer.score(items_of("a"))


def test_an_answer_that_trickles_is_cut_off(service: Service) -> None:
    def trickle(number: int, items: Items) -> Reply:
        return Reply(
            b"", headers={"Content-Length": "1000000", "Connection": "keep-alive"}
        )

    service.behave = trickle
    changes = {"request_timeout_s": 0.2, "max_attempts": 1}
    with (
        scoring(service.url, **changes, max_outage_s=AT_ONCE_S) as scorer,
        pytest.raises(GraderOutage, match=r"no reply within 0\.2 s"),
    ):
        scorer.score(items_of("a"))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0" * 1000,
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.1 2",
    ],
)
def test_what_is_no_http_is_no_service(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(
                            1 << 16
                        ):  # what is left unread would reset the connection
                            pass

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            scoring(url, max_outage_s=AT_ONCE_S) as scorer,
            pytest.raises(GraderOutage, match="RemoteProtocolError"),
        ):
            scorer.score(items_of("a"))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_requests_leave_no_faster_than_the_limit(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []
    turn = ServiceClient._wait_for_turn

    async def noted(scorer: ServiceClient) -> None:
        await turn(scorer)
        left.append(time.monotonic())

    monkeypatch.setattr(ServiceClient, "_wait_for_turn", noted)
    service.behave = lambda number, items: (
        Reply(b"", status=500) if number == 3 else lengths(items)
    )
    with scoring(service.url, requests_per_s=20.0, batch_size=1) as scorer:
        assert scorer.score(items_of(*["ab"] * 10)) == [Score(2.0, ScoreHealth.OK)] * 10
    assert (
        len(service.arrived) == len(left) == 11
    )  # the repeated one waits for its turn too
    # A busy machine lets one of them go late, and the next one on time.
    assert left[-1] - left[0] >= 0.9 * 10 / 20.0
    distances = [later - earlier for earlier, later in itertools.pairwise(left)]
    assert min(distances) >= 0.5 / 20.0


def test_the_wait_for_a_first_turn_is_not_on_the_clock(service: Service) -> None:
    with scoring(
        service.url, requests_per_s=2.5, batch_size=1, concurrency=6, deadline_s=1.5
    ) as scorer:
        assert (
            scorer.score(items_of(*["ab"] * 6)) == [Score(2.0, ScoreHealth.OK)] * 6
        )  # the last waits 2 s


def test_a_repeated_request_waits_for_its_turn_within_the_deadline(
    service: Service,
) -> None:
    service.behave = lambda number, items: Reply(b"", status=500)
    changes = {"requests_per_s": 0.5, "deadline_s": 0.5, "max_outage_s": AT_ONCE_S}
    with (
        scoring(service.url, **changes) as scorer,
        pytest.raises(GraderOutage, match="status 500"),
    ):
        scorer.score(items_of("a"))
    # The second one has its turn after the deadline, and asks for the whole service.
    assert len(service.arrived) == 2


# ------------------------------------------------------------- a service that is killed


PROGRAM = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"hang" in body:
            print("hangs", flush=True)
            time.sleep(60)
        reply = b'{"scores": [1]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass

with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
    print(server.server_port, flush=True)
    server.serve_forever()
"""


@contextlib.contextmanager
def service_process(port: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    arguments = [sys.executable, "-c", PROGRAM, str(port)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.processes
def test_a_service_killed_in_the_middle_of_a_request_and_back_again() -> None:
    with service_process(0) as (process, port):

        def kill_when_asked() -> None:
            assert process.stdout is not None
            assert process.stdout.readline() == "hangs\n"
            os.kill(process.pid, signal.SIGKILL)

        url = f"http://127.0.0.1:{port}"
        scorer = RemoteScorer(config(url, batch_size=1, max_outage_s=AT_ONCE_S))
        assert scorer.score(items_of("a")) == [Score(1.0, ScoreHealth.OK)]
        killer = threading.Thread(target=kill_when_asked)
        killer.start()
        # The end of the connection is noticed, not timed out.
        with pytest.raises(GraderOutage, match="ConnectError"):
            scorer.score(items_of("hang"))
        killer.join()
        assert process.wait() == -signal.SIGKILL
    with scorer:
        with pytest.raises(GraderOutage, match="ConnectError"):
            scorer.score(items_of("a"))
        with service_process(port):
            assert scorer.score(items_of("a")) == [Score(1.0, ScoreHealth.OK)]
