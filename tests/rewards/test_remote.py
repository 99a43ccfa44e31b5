"""The scorer against a service that is slow, broken, lying or gone; the servers, sockets and processes are real."""

from __future__ import annotations

import contextlib
import email.utils
import gzip
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from verl_ray.config.reward import HttpReward
from verl_ray.errors import ConfigError, DataError, RewardError
from verl_ray.rewards.health import Health, Score
from verl_ray.rewards.process import ScoreRequest
from verl_ray.rewards.remote import RemoteScorer, url_problem

Items = list[dict[str, Any]]


@dataclass(frozen=True)
class Reply:
    """What the service says to one request."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    endless: bool = False
    """Whether the body is sent again and again until the client has had enough."""


def lengths(items: Items) -> Reply:
    return Reply(json.dumps({"scores": [len(item["response"]) for item in items]}).encode())


class Service(ThreadingHTTPServer):
    """A scoring service in threads of this process. `behave` gets the number of the request, from 1, and its items."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/score?key=secret"
        self.behave: Callable[[int, Items], Reply] = lambda number, items: lengths(items)
        self.lock = threading.Lock()
        self.arrived: list[float] = []  # when each request came
        self.sizes: list[int] = []  # items of each request
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.busy = self.most_busy = 0  # requests in hand: now, and at most
        self.ended = threading.Event()

    def hang(self, number: int, items: Items) -> Reply:
        self.ended.wait()
        return lengths(items)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is no news here."""


class Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def do_POST(self) -> None:
        service = self.server
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        with service.lock:
            service.arrived.append(time.monotonic())
            service.sizes.append(len(items))
            service.headers.append(dict(self.headers))
            service.busy += 1
            service.most_busy = max(service.most_busy, service.busy)
            number = len(service.arrived)
        try:
            reply = service.behave(number, items)
        finally:
            with service.lock:
                service.busy -= 1
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)
        while reply.endless:
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()


def config(url: str, **changes: object) -> HttpReward:
    values: dict[str, Any] = {
        "kind": "http",
        "num_ranks": 1,
        "url": url,
        "token_env": None,
        "batch_size": 4,
        "concurrency": 3,
        "requests_per_s": None,
        "request_timeout_s": 5.0,
        "deadline_s": 10.0,
        "max_attempts": 3,
        "backoff_s": 0.01,
        "circuit_failures": 100,
        "circuit_reset_s": 60.0,
        "normalise": "none",
        "clip": None,
        "max_failed_fraction": 0.0,
    }
    return HttpReward(**values | changes)


@contextlib.contextmanager
def scoring(url: str, **changes: object) -> Iterator[RemoteScorer]:
    with RemoteScorer(config(url, **changes)) as scorer:
        yield scorer


def items_of(*responses: str) -> list[ScoreRequest]:
    return [ScoreRequest(response, "", "", "maths", {}) for response in responses]


def healths(scores: Sequence[Score]) -> list[Health]:
    assert all(math.isnan(score.value) and score.detail for score in scores if score.health is not Health.OK)
    return [score.health for score in scores]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------------- scores


def test_scores_come_back_in_order_over_many_batches(service: Service) -> None:
    def later_ones_first(number: int, items: Items) -> Reply:
        time.sleep(0.03 if number % 3 == 1 else 0.0)
        return lengths(items)

    service.behave = later_ones_first
    with scoring(service.url) as scorer:
        for _ in range(2):
            scores = scorer.score(items_of(*("x" * n for n in range(30))))
            assert [score.value for score in scores] == [float(n) for n in range(30)]
            assert {(score.health, score.detail) for score in scores} == {(Health.OK, "")}
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
        [score] = scorer.score([ScoreRequest("ré\n\ud800", "a", "p", "maths", {"n": [1, {"m": None}]})])
    assert score == Score(4.0, Health.OK)
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


def test_an_extra_that_json_cannot_hold_is_refused_before_anything_is_sent(service: Service) -> None:
    with scoring(service.url) as scorer:
        with pytest.raises(DataError, match=r"extra of an item holds what JSON cannot .*object"):
            scorer.score([*items_of(*"abcdefgh"), ScoreRequest("", "", "", "", {"n": object()})])
        assert service.arrived == []
        assert scorer.score(items_of("ab")) == [Score(2.0, Health.OK)]


# ---------------------------------------------------------------------------------------------------- wrong answers


@pytest.mark.parametrize(
    ("entry", "health", "detail"),
    [
        ("0", Health.OK, ""),
        ("-1.5e2", Health.OK, ""),
        ("null", Health.NONE, "null"),
        ("NaN", Health.NONFINITE, "nan"),
        ("-Infinity", Health.NONFINITE, "-inf"),
        ('"NaN"', Health.NONFINITE, "'NaN'"),
        ('"-Infinity"', Health.NONFINITE, "'-Infinity'"),
        ("1e999", Health.NONFINITE, "inf"),
        ("1e39", Health.NONFINITE, "1e+39"),  # an infinity in float32
        ("9" * 5000, Health.NONFINITE, "inf"),  # more digits than Python makes an int of
        ("true", Health.UNPARSED, "True"),
        ('"1.0"', Health.UNPARSED, "'1.0'"),
        ('"' + "long " * 1000 + '"', Health.UNPARSED, "'long long"),
        (r'"\ud800"', Health.UNPARSED, r"\ud800"),
        ("[1.0]", Health.UNPARSED, "[1.0]"),
        ("[" * 900 + "]" * 900, Health.UNPARSED, "[[["),
        ('{"score": 1.0}', Health.UNPARSED, "{'score': 1.0}"),
    ],
)
def test_a_wrong_entry_costs_its_own_score_only(service: Service, entry: str, health: Health, detail: str) -> None:
    service.behave = lambda number, items: Reply(f'{{"scores": [1, {entry}, 3]}}'.encode())
    with scoring(service.url) as scorer:
        scores = scorer.score(items_of("a", "b", "c"))
    assert healths(scores) == [Health.OK, health, Health.OK]
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
        (Reply(b"<html>" + b"x" * 10_000), "not JSON (Expecting value: line 1 column 1 (char 0)): '<html>xxx"),
        (Reply(b"\xff\xfe\xfd"), "not JSON"),
        (Reply(b"[" * 100_000), "not JSON"),
        (Reply(b"", status=204), "not JSON"),
        (Reply(b"no gzip", headers={"Content-Encoding": "gzip"}), "cannot be decompressed"),
        (Reply(gzip.compress(b" " * (1 << 25)), headers={"Content-Encoding": "gzip"}), "longer than 16777216 bytes"),
        (Reply(b" " * (1 << 16), headers={"Content-Length": "9" * 15}, endless=True), "longer than 16777216 bytes"),
    ],
)
def test_an_answer_of_the_wrong_shape_costs_its_batch_and_is_not_asked_for_again(
    service: Service, reply: Reply, detail: str
) -> None:
    service.behave = lambda number, items: reply if number == 1 else lengths(items)
    with scoring(service.url, batch_size=3, concurrency=1) as scorer:
        scores = scorer.score(items_of("a", "b", "c", "dd"))
    assert healths(scores) == [Health.UNPARSED] * 3 + [Health.OK]
    assert detail in scores[0].detail
    assert len(scores[0].detail) < 400
    assert len(service.arrived) == 2


# -------------------------------------------------------------------------------------------------- failures, retries


def test_500_twice_then_success(service: Service) -> None:
    service.behave = lambda number, items: Reply(b"", status=500) if number <= 2 else lengths(items)
    with scoring(service.url) as scorer:
        assert scorer.score(items_of("ab", "c")) == [Score(2.0, Health.OK), Score(1.0, Health.OK)]
    assert len(service.arrived) == 3


def test_waits_between_attempts_double(service: Service) -> None:
    service.behave = lambda number, items: Reply(b"over capacity", status=503)
    with scoring(service.url, backoff_s=0.05, max_attempts=5) as scorer:
        [score] = scorer.score(items_of("a"))
    assert score.health is Health.UNAVAILABLE
    assert score.detail == "the service answered with status 503: 'over capacity' (attempt 5 of 5)"
    waits_s = [later - earlier for earlier, later in zip(service.arrived, service.arrived[1:], strict=False)]
    for wait_s, backoff_s in zip(waits_s, [0.05, 0.1, 0.2, 0.4], strict=True):
        assert 0.5 * backoff_s <= wait_s < 1.5 * backoff_s + 1.0  # the jitter, and room for a busy machine


@pytest.mark.parametrize("as_date", [False, True])
def test_429_is_asked_again_when_the_service_says(service: Service, as_date: bool) -> None:
    when = (
        email.utils.formatdate(time.time() + 2, usegmt=True) if as_date else "1"
    )  # a date has whole seconds: 1 to 2 are left
    limited = Reply(b"", status=429, headers={"Retry-After": when})
    service.behave = lambda number, items: limited if number == 1 else lengths(items)
    with scoring(service.url) as scorer:
        assert scorer.score(items_of("ab")) == [Score(2.0, Health.OK)]
    first, second = service.arrived
    assert second - first >= 0.99


@pytest.mark.parametrize("when", ["60", "9" * 500, "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_retry_that_would_miss_the_deadline_is_not_waited_for(service: Service, when: str) -> None:
    service.behave = lambda number, items: Reply(b"", status=429, headers={"Retry-After": when})
    began = time.monotonic()
    with scoring(service.url) as scorer:
        [score] = scorer.score(items_of("ab"))
    assert time.monotonic() - began < 2
    assert score.health is Health.UNAVAILABLE
    assert "status 429" in score.detail


@pytest.mark.parametrize("when", ["soon", "-5", "nan", "", "Fri, 31 Dec 99999 23:59:59 GMT", "\u00b2"])
def test_a_retry_after_that_says_nothing_leaves_the_backoff(service: Service, when: str) -> None:
    limited = Reply(b"", status=429, headers={"Retry-After": when})
    service.behave = lambda number, items: limited if number == 1 else lengths(items)
    with scoring(service.url) as scorer:
        assert scorer.score(items_of("ab")) == [Score(2.0, Health.OK)]


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        (Reply(b'{"detail": "Not Found"}', status=404), """status 404: '{"detail": "Not Found"}'"""),
        (Reply(b"", status=401), "status 401"),
        (Reply(b"", status=307, headers={"Location": "/score/"}), "status 307, go to '/score/'"),
    ],
)
def test_a_refusal_is_not_asked_again(service: Service, reply: Reply, detail: str) -> None:
    service.behave = lambda number, items: reply
    with scoring(service.url) as scorer:
        [score] = scorer.score(items_of("a"))
    assert score.health is Health.UNAVAILABLE
    assert detail in score.detail
    assert "attempt" not in score.detail
    assert len(service.arrived) == 1


def test_a_slow_service_costs_the_deadline_and_no_more(service: Service) -> None:
    service.behave = service.hang
    with scoring(service.url, request_timeout_s=0.2, deadline_s=0.5, max_attempts=100) as scorer:
        began = time.monotonic()
        scores = scorer.score(items_of(*"abcdefgh"))  # two batches, in flight together
        took_s = time.monotonic() - began
        assert healths(scores) == [Health.TIMEOUT] * 8
        assert "no answer within" in scores[0].detail
        assert 0.4 < took_s < 1.5
        assert 2 * 2 <= len(service.arrived) <= 2 * 3
        service.behave = lambda number, items: lengths(items)
        assert scorer.score(items_of(*["ab"] * 24)) == [Score(2.0, Health.OK)] * 24  # no connection was lost for good


def test_the_deadline_cuts_a_request_short(service: Service) -> None:
    service.behave = service.hang
    with scoring(service.url, request_timeout_s=30.0, deadline_s=0.3) as scorer:
        began = time.monotonic()
        assert healths(scorer.score(items_of("a"))) == [Health.TIMEOUT]
        assert time.monotonic() - began < 3
    assert len(service.arrived) == 1


def test_an_answer_that_trickles_is_cut_off(service: Service) -> None:
    def trickle(number: int, items: Items) -> Reply:
        return Reply(b"", headers={"Content-Length": "1000000", "Connection": "keep-alive"})

    service.behave = trickle
    with scoring(service.url, request_timeout_s=0.2, max_attempts=1) as scorer:
        [score] = scorer.score(items_of("a"))
    assert (score.health, score.detail) == (Health.TIMEOUT, "no answer within 0.2 s (attempt 1 of 1)")


@pytest.mark.parametrize(
    "answer",
    [b"", b"\0" * 1000, b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 2"],
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
                        while connection.recv(1 << 16):  # what is left unread would reset the connection
                            pass

        thread = threading.Thread(target=serve)
        thread.start()
        with scoring(f"http://127.0.0.1:{listener.getsockname()[1]}") as scorer:
            [score] = scorer.score(items_of("a"))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert score.health is Health.UNAVAILABLE
    assert "RemoteProtocolError" in score.detail
    assert "attempt 3 of 3" in score.detail


def test_requests_leave_no_faster_than_the_limit(service: Service) -> None:
    service.behave = lambda number, items: Reply(b"", status=500) if number == 3 else lengths(items)
    with scoring(service.url, requests_per_s=20.0, batch_size=1) as scorer:
        assert scorer.score(items_of(*["ab"] * 10)) == [Score(2.0, Health.OK)] * 10
    assert len(service.arrived) == 11  # the repeated one waits for its turn too
    assert 10 / 20.0 - 0.05 <= service.arrived[-1] - service.arrived[0] < 10 / 20.0 + 1.0
    distances = [later - earlier for earlier, later in zip(service.arrived, service.arrived[1:], strict=False)]
    assert sum(distance < 0.02 for distance in distances) <= 2  # even ones, but for a machine that stalls


def test_the_wait_for_a_first_turn_is_not_on_the_clock(service: Service) -> None:
    with scoring(service.url, requests_per_s=10.0, batch_size=1, concurrency=10, deadline_s=0.5) as scorer:
        assert scorer.score(items_of(*["ab"] * 10)) == [Score(2.0, Health.OK)] * 10  # the last waits 0.9 s


def test_a_repeated_request_waits_for_its_turn_within_the_deadline(service: Service) -> None:
    service.behave = lambda number, items: Reply(b"", status=500)
    with scoring(service.url, requests_per_s=2.0, deadline_s=0.3) as scorer:
        began = time.monotonic()
        [score] = scorer.score(items_of("a"))
        assert time.monotonic() - began < 1
    assert (score.health, len(service.arrived)) == (Health.UNAVAILABLE, 1)
    assert "status 500" in score.detail
    assert "attempt 1 of 3" in score.detail


# ------------------------------------------------------------------------------------------------ the circuit breaker


def test_the_circuit_opens_and_closes_again(service: Service, capfd: pytest.CaptureFixture[str]) -> None:
    service.behave = lambda number, items: Reply(b"", status=500)
    changes = {"circuit_failures": 3, "circuit_reset_s": 0.6, "max_attempts": 2, "concurrency": 1}
    with scoring(service.url, **changes) as scorer:
        scores = scorer.score(items_of(*["ab"] * 40))  # ten batches
        assert healths(scores) == [Health.UNAVAILABLE] * 40
        assert len(service.arrived) == 3 * 2
        assert "status 500" in scores[11].detail
        assert (
            "not sent: the circuit is open after 3 failed batches in a row, the last: the service" in scores[12].detail
        )
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith(f"warning: reward.url=http://127.0.0.1:{service.server_port}/score: the circuit is open")
        assert "secret" not in line

        time.sleep(0.65)
        assert healths(scorer.score(items_of(*["ab"] * 40))) == [Health.UNAVAILABLE] * 40
        assert len(service.arrived) == 4 * 2  # one trial
        assert capfd.readouterr().err == ""

        service.behave = lambda number, items: lengths(items)
        assert healths(scorer.score(items_of("ab"))) == [Health.UNAVAILABLE]  # open for another 0.6 s
        time.sleep(0.65)
        assert scorer.score(items_of(*["ab"] * 40)) == [Score(2.0, Health.OK)] * 40
        assert len(service.arrived) == 4 * 2 + 10
        [line] = capfd.readouterr().err.splitlines()
        assert line.endswith("/score: answers again, the circuit is closed")

        service.behave = lambda number, items: Reply(b"", status=500)
        scorer.score(items_of(*["ab"] * 40))
        assert len(service.arrived) == 4 * 2 + 10 + 3 * 2  # counted from nothing again


def test_batches_wait_for_the_trial_and_none_is_repeated_into_an_open_circuit(service: Service) -> None:
    def fail_late(number: int, items: Items) -> Reply:
        time.sleep(0.2)
        return Reply(b"", status=500)

    service.behave = fail_late
    changes = {"circuit_failures": 1, "circuit_reset_s": 0.5, "max_attempts": 1, "batch_size": 1}
    with scoring(service.url, **changes) as scorer:
        assert healths(scorer.score(items_of(*"abcdef"))) == [Health.UNAVAILABLE] * 6
        assert len(service.arrived) == 3  # those in flight when the first failed
        time.sleep(0.55)
        assert healths(scorer.score(items_of(*"abcdef"))) == [Health.UNAVAILABLE] * 6
        assert len(service.arrived) == 4
    service.arrived.clear()
    service.behave = lambda number, items: Reply(b"", status=404 if items[0]["response"] == "a" else 500)
    with scoring(service.url, **changes | {"max_attempts": 50, "concurrency": 2, "backoff_s": 0.3}) as scorer:
        assert healths(scorer.score(items_of(*"ba"))) == [Health.UNAVAILABLE] * 2
    assert len(service.arrived) == 2


def test_an_answer_to_what_was_sent_before_the_circuit_opened_does_not_close_it(service: Service) -> None:
    def late_or_broken(number: int, items: Items) -> Reply:
        if items[0]["response"] == "broken":
            return Reply(b"", status=404)
        until(lambda: len(service.arrived) == 2)
        time.sleep(0.3)
        return lengths(items)

    service.behave = late_or_broken
    with scoring(service.url, circuit_failures=1, batch_size=1) as scorer:
        assert healths(scorer.score(items_of("late", "broken"))) == [Health.OK, Health.UNAVAILABLE]
        assert healths(scorer.score(items_of("late"))) == [Health.UNAVAILABLE]
    assert len(service.arrived) == 2


def test_an_answer_between_failures_keeps_the_circuit_closed(service: Service) -> None:
    service.behave = lambda number, items: Reply(b"", status=404) if number % 3 else lengths(items)
    with scoring(service.url, circuit_failures=3, concurrency=1, batch_size=1) as scorer:
        scores = scorer.score(items_of(*["ab"] * 9))
    assert healths(scores) == [Health.UNAVAILABLE, Health.UNAVAILABLE, Health.OK] * 3
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
def test_a_batch_without_any_answer_counts_for_the_circuit(service: Service, body: bytes, requests: int) -> None:
    service.behave = lambda number, items: Reply(body)
    with scoring(service.url, circuit_failures=2, concurrency=1, batch_size=2) as scorer:
        scorer.score(items_of(*["ab"] * 10))
    assert len(service.arrived) == requests


# ------------------------------------------------------------------------------------------ a service that is killed

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


def test_a_service_killed_in_the_middle_of_a_request_and_back_again() -> None:
    with service_process(0) as (process, port):

        def kill_when_asked() -> None:
            assert process.stdout is not None
            assert process.stdout.readline() == "hangs\n"
            os.kill(process.pid, signal.SIGKILL)

        scorer = RemoteScorer(config(f"http://127.0.0.1:{port}", batch_size=1))
        assert scorer.score(items_of("a")) == [Score(1.0, Health.OK)]
        killer = threading.Thread(target=kill_when_asked)
        killer.start()
        began = time.monotonic()
        [score] = scorer.score(items_of("hang"))
        assert time.monotonic() - began < 4  # the end of the connection is noticed, not timed out
        killer.join()
        assert score.health is Health.UNAVAILABLE
        assert "attempt 3 of 3" in score.detail
        assert process.wait() == -signal.SIGKILL
    with scorer:
        [score] = scorer.score(items_of("a"))
        assert score.health is Health.UNAVAILABLE
        assert "ConnectError" in score.detail
        with service_process(port):
            assert scorer.score(items_of("a")) == [Score(1.0, Health.OK)]


# --------------------------------------------------------------------------------------------------- start and end


def test_the_token_arrives(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_TOKEN", "s3cret")
    for token_env in ("GRADER_TOKEN", None):
        with scoring(service.url, token_env=token_env) as scorer:
            scorer.score(items_of("a"))
    assert [headers.get("Authorization") for headers in service.headers] == ["Bearer s3cret", None]
    assert service.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize("token", [None, "", "s3cret\n", "s3cré", "s3 cret"])
def test_a_token_that_cannot_be_sent_is_refused(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    "url", ["http://host", "https://host:8000/score?model=a", "HTTP://127.0.0.1:1/", "http://[::1]:80"]
)
def test_urls(url: str) -> None:
    assert url_problem(url, "reward.url") is None
    RemoteScorer(config(url)).close()


def test_a_host_name_that_only_the_client_refuses() -> None:
    url = "http://999.1.1.1/score"
    assert url_problem(url, "reward.url") is None
    with pytest.raises(ConfigError, match=r"reward\.components\.x\.url = 'http://999\.1\.1\.1/score': is no URL"):
        RemoteScorer(config(url), key="reward.components.x")


@pytest.mark.parametrize("url", ["http://me:s3cret@host/score", "http://me:s3cret@host:70000/score"])
def test_a_password_in_the_url_is_refused_and_not_shown(url: str) -> None:
    problem = url_problem(url, "reward.url")
    assert problem is not None
    assert "***@host" in str(problem)
    assert "s3cret" not in str(problem)


def test_checking_a_url_imports_no_client() -> None:
    program = (
        "import sys; from verl_ray.rewards.remote import url_problem; url_problem('http://host', 'reward.url');"
        "print([name for name in ('httpx', 'torch', 'ray', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"


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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in an earlier test has its own
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
