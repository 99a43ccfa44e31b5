"""A trial of users' code in a child process, which is killed at a deadline.

Invariant: whatever the code does, the trial ends in bounded time with what the child
has told until then.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from verl_ray.processes.child import ChildProcess
from verl_ray.processes.frames import (
    Frame,
    frame,
    frames_of,
    require_unbroken,
    start_frame,
    started,
)

Tell = Callable[[str, Mapping[str, Any]], None]
"""Sends a frame of a kind, with fields, to the parent."""


def try_in_child(
    module: str, fields: Mapping[str, Any], deadline_s: float
) -> tuple[list[Frame], str]:
    """Let a module try something in a process of its own; see `run_trial`.

    Args:
        module: Its `main` calls `run_trial`.
        fields: What it must know, as values of JSON.
        deadline_s: Seconds after which it is killed.

    Returns:
        What it has told, of which the last frame is the result if it has finished; and
        how it ended where it has not, as the end of a sentence.

    Raises:
        ConfigError: It has raised one.
    """
    messages: list[Frame] = []
    cause = ""
    until_s = time.monotonic() + deadline_s
    child = ChildProcess(module)
    with child.connection:
        try:
            child.connection.settimeout(deadline_s)
            child.connection.sendall(start_frame(fields))
            # Ends with the process.
            for message in frames_of(child.connection):
                require_unbroken(message)
                messages.append(message)
                if message.kind == "ready":
                    return messages, ""
                child.connection.settimeout(max(0.001, until_s - time.monotonic()))
        except TimeoutError:
            cause = f"took longer than {deadline_s:g} s"
        except ValueError as error:
            cause = f"sent what is no frame ({error})"
        except ConnectionError:
            pass
        finally:
            ended = child.end()
    return messages, cause or ended


def run_trial(
    connection: socket.socket,
    body: Callable[[dict[str, Any], Tell], Mapping[str, Any]],
) -> None:
    """Run a trial in the child.

    Args:
        connection: The connection to the parent.
        body: Takes the parent's fields, and may tell something meanwhile. Its result
            are the fields of the last frame.
    """

    def tell(kind: str, fields: Mapping[str, Any]) -> None:
        connection.sendall(frame(kind, fields))

    start = next(frames_of(connection))
    _, answer = started(start, lambda fields: (True, body(fields, tell)))
    connection.sendall(answer)
