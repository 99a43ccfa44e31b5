"""A scoring service in this process that a test makes slow, broken or lying, and a
scorer to ask it.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl_ray.config.reward import HttpReward
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.remote import RemoteScorer
from verl_ray.rewards.request import ScoreRequest

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
    return Reply(
        json.dumps({"scores": [len(item["response"]) for item in items]}).encode()
    )


class Service(ThreadingHTTPServer):
    """A scoring service in threads of this process. `behave` gets the number of the
    request, from 1, and its items.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/score?key=secret"
        self.behave: Callable[[int, Items], Reply] = lambda number, items: lengths(
            items
        )
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
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))[
            "items"
        ]
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
        for name, value in {
            "Content-Length": str(len(reply.body)),
            **reply.headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)
        while reply.endless:
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def config(url: str, **changes: object) -> HttpReward:
    values: dict[str, Any] = {
        "kind": "http",
        "num_ranks": 1,
        "url": url,
        "token_env": None,
        "batch_size": 4,
        "concurrency": 3,
        "requests_per_s": None,
        "request_timeout_s": 60.0,  # neither of them passes unless a test wants it to
        "deadline_s": 120.0,
        "max_attempts": 3,
        "backoff_s": 0.01,
        "max_outage_s": 600.0,
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


def healths(scores: Sequence[Score]) -> list[ScoreHealth]:
    assert all(
        math.isnan(score.value) and score.detail
        for score in scores
        if score.health is not ScoreHealth.OK
    )
    return [score.health for score in scores]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
