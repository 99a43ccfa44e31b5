"""A server of a report that follows its runs, for browsers of this machine.

Invariant: it sends nothing but the page, and only to who has the token, where there is
one. Without one it listens to this machine alone, and only under names of this machine,
so that no page of another site can read it through a name that it has redirected.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from verl_ray.report.page import MOST_ROWS, page
from verl_ray.report.record import fingerprint, read_run
from verl_ray.tracking.report import LARGEST_SHARE

LOOPBACK = "127.0.0.1"

PERIOD_S = 5.0
"""Shortest time between two pages."""


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(folders: Sequence[Path], host: str, port: int, token: str) -> None:
    """Serve the report of some runs until the process is stopped.

    Args:
        folders: Folders of the runs.
        host: Address to listen at.
        port: Port to listen at; 0 for any that is free.
        token: Text that the query of a request has to hold; empty for none.

    Raises:
        OSError: The address cannot be listened at.
    """
    with ReportServer(folders, host, port, token) as server:
        print(f"report: {server.address} (Ctrl-C ends it)", flush=True)
        server.serve_forever()


class ReportServer(ThreadingHTTPServer):
    """A server that makes the page anew when the record has changed, now and then."""

    daemon_threads = True

    def __init__(
        self,
        folders: Sequence[Path],
        host: str,
        port: int,
        token: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to listen.

        Args:
            folders: Folders of the runs.
            host: Address to listen at.
            port: Port to listen at; 0 for any that is free.
            token: Text that the query of a request has to hold; empty for none.
            clock: Clock in seconds that only increases.

        Raises:
            OSError: The address cannot be listened at.
        """
        self._folders = list(folders)
        self.token = token
        self.demands_own_name = is_loopback(host)
        self._lock = threading.Lock()
        self._page = b""
        self._version = ""
        self._clock = clock
        self._next_s = 0.0
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        """The URL of the page."""
        host, port = self.server_address[:2]
        shown_host = f"[{host!s}]" if ":" in str(host) else str(host)
        query = f"?token={quote(self.token, safe='')}" if self.token else ""
        return f"http://{shown_host}:{port}/{query}"

    @property
    def _present_version(self) -> str:
        """The version of the record, as an entity tag."""
        facts = repr([fingerprint(folder) for folder in self._folders])
        return f'"{sha256(facts.encode()).hexdigest()[:16]}"'

    def page(self) -> tuple[bytes, str]:
        """Return the page, and the version of the record that it was made from.

        That is the present record, or the one of a moment before.
        """
        # Browsers that ask at the same time wait for one page.
        with self._lock:
            start_s = self._clock()
            if self._page and start_s < self._next_s:
                return self._page, self._version
            version = self._present_version
            if version != self._version:
                most_rows = -(-MOST_ROWS // len(self._folders))
                records = [read_run(folder, most_rows) for folder in self._folders]
                self._page = page(records, live=version)
                self._version = version
                end_s = self._clock()
                pause_s = max(PERIOD_S, (end_s - start_s) / LARGEST_SHARE)
                self._next_s = end_s + pause_s
            return self._page, self._version

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what a request raised, unless a browser has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Reply with the page, or with why there is none."""
        try:
            address = urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        if self.server.demands_own_name and not self._names_this_machine():
            self.send_error(HTTPStatus.FORBIDDEN, "The page is for this machine alone")
            return
        if not self._has_token(parse_qs(address.query)):
            self.send_error(HTTPStatus.FORBIDDEN, "The address has to have the token")
            return
        if address.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return

        content, version = self.server.page()
        if self.headers.get("If-None-Match") == version:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.end_headers()
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", version)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(content)

    def _names_this_machine(self) -> bool:
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return False
        return host is not None and is_loopback(host)

    def _has_token(self, query: dict[str, list[str]]) -> bool:
        sent = query.get("token", [""])[0]
        return not self.server.token or hmac.compare_digest(
            sent.encode(), self.server.token.encode()
        )

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the address of a request may hold the token."""
