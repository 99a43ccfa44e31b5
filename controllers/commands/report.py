"""The command `report`: what runs did, as one HTML file or as a page that follows them.

Invariant: the runs are asked nothing, so their folders are enough, wherever they are,
and neither torch nor ray is imported. The server sends nothing but the page, and only
to who has the token, where there is one. Without one it listens to this machine alone,
and only under names of this machine, so that no page of another site can read it
through a name that it has redirected.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import os
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

from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import OUTPUTS, RUN_HELP, run_folder, shown_path, typed_path
from verl_ray.report.page import page_of
from verl_ray.report.record import fingerprint
from verl_ray.report.tracker import LARGEST_SHARE, PAGE, write_report

TOKEN = "VERL_RAY_REPORT_TOKEN"
"""Environment variable with what a browser has to show where others reach the page."""


def main(argv: list[str]) -> int:
    """Write the report of some runs, or serve it.

    Raises:
        ConfigError: There is no such run, or the report cannot be written or served.
    """
    arguments = _parser().parse_args(argv)
    folders = [run_folder(run) for run in arguments.runs]
    if arguments.serve:
        if arguments.output is not None:
            rule = "writes no file beside --serve"
            fix = "Leave out one of them."
            raise ConfigError([Problem("--output", arguments.output, rule, fix)])
        return _serve(folders, arguments.host, arguments.port)

    default = folders[0] / PAGE if len(folders) == 1 else Path(PAGE)
    output = default
    if arguments.output is not None:
        output = typed_path("--output", arguments.output)
    try:
        write_report(folders, output)
    except OSError as error:
        fix = "Name a file in a folder that can be written."
        problem = Problem("--output", str(output), f"cannot be written: {error}", fix)
        raise ConfigError([problem]) from error
    print(f"report: {shown_path(output.absolute())}")
    return 0


def _serve(folders: Sequence[Path], host: str, port: int) -> int:
    token = os.environ.get(TOKEN, "")
    if not is_loopback(host) and not token:
        rule = f"{TOKEN} is not set, and others can reach this address"
        fix = f"Set {TOKEN} to a long random text, or leave out --host."
        raise ConfigError([Problem("--host", host, rule, fix)])
    try:
        with ReportServer(folders, host, port, token) as server:
            print(f"report: {server.address} (Ctrl-C ends it)", flush=True)
            server.serve_forever()
    # A port beyond the largest one overflows.
    except (OSError, OverflowError) as error:
        rule = f"no server can listen at {host}, port {port}: {error}"
        fix = "Name another --port; 0 stands for any that is free."
        raise ConfigError([Problem("--port", port, rule, fix)]) from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray report",
        description=(
            "Write what runs did to one HTML file that makes no request: state,"
            " findings, curves, prompts and responses, time and memory. It is made from"
            " their folders alone, also of runs that go on or have crashed. Several"
            " runs are laid over each other. Nothing is started or changed."
        ),
        epilog=(
            "examples:\n"
            f"  verl-ray report {OUTPUTS}/first\n"
            "  verl-ray report first second --output both.html\n"
            "  verl-ray report --serve first\n\n"
            "Where --host is not of this machine alone, the environment variable\n"
            f"{TOKEN} has the token that the address of the page has to end with:\n"
            "http://HOST:PORT/?token=TOKEN\n\n"
            "exit codes:\n"
            "  0  the report is written, or was served until it was stopped\n"
            "  2  there is no such run, or the report cannot be written or served\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the file; without it {PAGE} in the run's folder, or here for several",
    )
    parser.add_argument(
        "--serve", action="store_true", help="serve the page, and follow the runs"
    )
    parser.add_argument("--host", default=LOOPBACK, help="address to listen at")
    parser.add_argument("--port", type=int, default=8200, help="port to listen at")
    return parser


# ------------------------------------------------------------------------ the server

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
                self._page = page_of(self._folders, live=version)
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
