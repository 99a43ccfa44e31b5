"""Child processes that end, hang and lie; each of them is real."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.processes import children
from tests.waiting import until
from verl_ray.errors import ConfigError
from verl_ray.processes.child import ChildProcess
from verl_ray.processes.frames import FrameReader, frame, frames_of, start_frame
from verl_ray.processes.trial import try_in_child

PATIENCE_S = 60.0


def test_frames_may_come_in_any_pieces() -> None:
    first, second = frame("a", {"text": "ä\ud800", "x": [0.1]}, b"\0\1"), frame("b", {})
    reader = FrameReader()
    whole = list(reader.feed(first + second[:3]))
    assert whole == [("a", {"text": "ä\ud800", "x": [0.1]}, b"\0\1")]
    pieces = [each for byte in second[3:] for each in reader.feed(bytes([byte]))]
    assert pieces == [("b", {}, b"")]
    with pytest.raises(ValueError, match="a frame of"):
        list(reader.feed(b"\xff" * 16))


@pytest.mark.processes
def test_nothing_of_a_trial_remains() -> None:
    # More than a socket holds, in both directions.
    text = "x" * 1_000_000
    fields = {"act": "escape", "text": text}
    (begun, result), cause = try_in_child(children.__name__, fields, PATIENCE_S)
    assert (begun.kind, result.kind, cause) == ("begun", "ready", "")
    assert result.fields["text"] == text
    assert not psutil.pid_exists(result.fields["sleeper"])
    assert not Path(begun.fields["folder"]).exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("act", "cause"),
    [
        ("raise", "exited with status 1"),
        ("exit", "exited with status 3"),
        (
            "die",
            "was killed by signal 9 (Killed), as the system does where memory is short",
        ),
        ("chatter", f"sent what is no frame (a frame of {2 * (2**64 - 1)} bytes)"),
    ],
)
def test_how_a_trial_ends_is_known(act: str, cause: str) -> None:
    (begun,), ended = try_in_child(children.__name__, {"act": act}, PATIENCE_S)
    assert (begun.kind, ended) == ("begun", cause)


@pytest.mark.processes
def test_a_trial_ends_at_its_deadline() -> None:
    _, cause = try_in_child(children.__name__, {"act": "hang"}, 2.0)
    assert cause == "took longer than 2 s"


@pytest.mark.processes
def test_what_a_child_refuses_is_a_problem_here() -> None:
    with pytest.raises(ConfigError) as caught:
        try_in_child(children.__name__, {"act": "refuse"}, PATIENCE_S)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, problem.rule) == ("key", "value", "rule")


@pytest.mark.processes
@pytest.mark.parametrize("who", ["guard", "worker"])
def test_a_child_that_was_stopped_ends_with_all_that_it_started(who: str) -> None:
    child = ChildProcess(children.__name__)
    with child.connection:
        child.connection.settimeout(PATIENCE_S)
        child.connection.sendall(start_frame({"act": "escape", "text": ""}))
        frames = frames_of(child.connection)
        begun, result = next(frames), next(frames)
        guard = psutil.Process(child.pid)
        (worker,) = (each for each in guard.children() if each.name() != "sleep")
        os.kill(child.pid if who == "guard" else worker.pid, signal.SIGSTOP)
        until(lambda: child.is_stopped)
        assert child.end() == "was stopped (SIGSTOP)"
        assert not psutil.pid_exists(result.fields["sleeper"])
        assert not Path(begun.fields["folder"]).exists()
        # Again, it is told again.
        assert child.end() == "was stopped (SIGSTOP)"


@pytest.mark.processes
def test_a_child_that_cannot_be_started_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[socket.socket] = []
    pair = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", lambda: opened.extend(pair()) or opened)
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        ChildProcess(children.__name__)
    assert [each.fileno() for each in opened] == [-1, -1]
