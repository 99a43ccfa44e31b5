"""`verl-ray report`, on folders alone."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controllers.command_line import main
from controllers.commands.report import LOOPBACK, TOKEN, ReportServer, is_loopback
from tests.kills import ROOT
from tests.report.recorded_runs import write_run
from tests.waiting import PATIENCE_S


def test_a_report_is_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "first")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\n"
    second = write_run(tmp_path / "second", ending="crashed")
    both = tmp_path / "both.html"
    assert main(["report", str(folder), str(second), "--output", str(both)]) == 0
    assert both.stat().st_size > (folder / "report.html").stat().st_size


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["none"], "there is no such folder"),
        (["run", "--output", "none/a.html"], "cannot be written"),
        (["run", "--serve", "--output", "a.html"], "beside --serve"),
        (["run", "--serve", "--host", "0.0.0.0"], TOKEN),
        (["run", "--serve", "--port", "99999"], "no server can listen"),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TOKEN, raising=False)
    write_run(tmp_path / "run")
    assert main(["report", *words]) == 2
    assert expected in capsys.readouterr().err


@contextmanager
def served(
    folder: Path,
    token: str = "",
    host: str = LOOPBACK,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ReportServer]:
    with ReportServer([folder], host, 0, token, clock) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def reply(
    server: ReportServer, path: str = "/", **headers: str
) -> tuple[int, str | None, bytes]:
    host, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(host), port, timeout=30)
    connection.request(
        "GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, response.headers["ETag"], content


def test_a_server_sends_the_page_once_per_version(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ending="crashed")
    now = [100.0]
    steps = iter([0.0, 2.0])

    def clock() -> float:
        now[0] += next(steps, 0.0)
        return now[0]

    with served(folder, clock=clock) as server:
        status, version, content = reply(server)
        assert (
            status == 200 and version is not None and b"connect-src 'self'" in content
        )
        assert reply(server, If_None_Match=version)[0] == 304
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("ard")
        # A page took two seconds, so the next one is made 100 s later.
        now[0] += 99
        assert reply(server, If_None_Match=version)[0] == 304
        now[0] += 2
        status, changed, _ = reply(server, If_None_Match=version)
        assert status == 200 and changed != version
        assert reply(server, "/metrics.jsonl")[0] == 404
        assert reply(server, Host="evil.example:80")[0] == 403
        assert reply(server, Host="localhost:80")[0] == 200
        assert reply(server, Host="[")[0] == 403
        with socket.create_connection(server.server_address[:2]) as connection:
            connection.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
            assert b" 400 " in connection.makefile("rb").readline()


def test_who_has_no_token_sees_nothing(tmp_path: Path) -> None:
    token = "s+c & r#t%"
    with served(write_run(tmp_path / "run"), token) as server:
        _, _, query = server.address.partition("/?")
        assert query == "token=s%2Bc%20%26%20r%23t%25"
        assert reply(server)[0] == reply(server, "/?token=secre")[0] == 403
        assert reply(server, f"/?{query}")[0] == 200


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")]
)
def test_a_server_listens_at_any_address_of_this_machine(
    tmp_path: Path, host: str, shown: str
) -> None:
    with served(write_run(tmp_path / "run"), host=host) as server:
        assert server.address.startswith(f"http://{shown}:")
        assert reply(server)[0] == 200


def test_a_browser_that_goes_away_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(write_run(tmp_path / "run")) as server:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            server.handle_error(None, (LOOPBACK, 1))
        assert capsys.readouterr().err == ""


def test_addresses_of_this_machine_are_known() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.8.0.1", "::1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org"]))


@pytest.mark.processes
def test_a_signal_ends_a_server(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    words = ["report", str(folder), "--serve", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "controllers", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("report: http://127.0.0.1:")
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "Traceback" not in errors
