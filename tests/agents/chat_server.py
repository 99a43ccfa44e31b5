"""A server with OpenAI's chat API in threads of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl_ray.agents.models import ChatSettings

Answer = tuple[int, Any]
"""Status and body of a reply."""


def says(content: object) -> Answer:
    return 200, {"choices": [{"message": {"role": "assistant", "content": content}}]}


def echo(call: dict[str, Any]) -> Answer:
    return says(f"you said {call['messages'][-1]['content']}")


class ChatServer(ThreadingHTTPServer):
    """`behave` makes a reply of the fields of a request."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.behave: Callable[[dict[str, Any]], Answer] = echo
        self.lock = threading.Lock()
        self.calls: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.tokens: list[str | None] = []
        self.busy = self.most_busy = 0


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        server = self.server
        call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.calls.append(call)
            server.paths.add(self.path)
            server.tokens.append(self.headers.get("Authorization"))
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
        status, body = server.behave(call)
        with server.lock:
            server.busy -= 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def chat_server(port: int = 0) -> Iterator[ChatServer]:
    server = ChatServer(port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def settings(url: str, **changes: Any) -> ChatSettings:
    usual = {
        "model": None, "token_env": None, "temperature": 0.0, "timeout_s": 5.0,
        "max_outage_s": 20.0, "concurrency": 8,
    }  # fmt: skip
    return ChatSettings(url=url, **(usual | changes))
