"""Frames between a process and a child that runs users' code, over one stream socket.

Invariant: a frame is a kind, fields in JSON, and bytes. Nothing is unpickled of what a
child sends. The first frame to a child is `start`, and it answers with `ready`, or with
`broken` and what is wrong with the configuration.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from verl_ray.errors import ConfigError, Problem
from verl_ray.user_files import module_path

READ_BYTES = 1 << 16
"""Bytes that are read of a socket at a time."""

_HEAD = struct.Struct("<QQ")
"""Number of bytes of the JSON, and of those that follow."""

_MOST_BYTES = 1 << 34
"""Bytes of a frame; more are a broken stream."""

T = TypeVar("T")


class Frame(NamedTuple):
    """A message in either direction."""

    kind: str
    fields: dict[str, Any]
    data: bytes


def frame(kind: str, fields: Mapping[str, Any], data: bytes = b"") -> bytes:
    """Return the bytes of a frame.

    Raises:
        TypeError: A field is no value of JSON.
    """
    text = json.dumps([kind, fields]).encode()
    return _HEAD.pack(len(text), len(data)) + text + data


class FrameReader:
    """Frames of a stream of bytes."""

    def __init__(self) -> None:
        """Begin at the start of a stream."""
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes; yield the frames that are complete.

        Raises:
            ValueError: The bytes are no frames.
        """
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            num_text, num_data = _HEAD.unpack_from(self._bytes)
            if num_text + num_data > _MOST_BYTES:
                raise ValueError(f"a frame of {num_text + num_data} bytes")
            data_at = _HEAD.size + num_text
            end = data_at + num_data
            if len(self._bytes) < end:
                return
            kind, fields = json.loads(self._bytes[_HEAD.size : data_at])
            content = bytes(self._bytes[data_at:end])
            del self._bytes[:end]
            yield Frame(kind, fields, content)


def frames_of(connection: socket.socket) -> Iterator[Frame]:
    """Yield the frames of a connection until the other side hangs up.

    Raises:
        OSError: The connection is broken, or nothing comes within its timeout.
        ValueError: What comes is no frame.
    """
    reader = FrameReader()
    while data := connection.recv(READ_BYTES):
        yield from reader.feed(data)


def start_frame(fields: Mapping[str, Any]) -> bytes:
    """Return the first frame to a child, which then imports what this process can."""
    return frame("start", {**fields, "sys_path": module_path()})


def started(
    start: Frame, load: Callable[[dict[str, Any]], tuple[T, Mapping[str, Any]]]
) -> tuple[T | None, bytes]:
    """Let a child load what its first frame names.

    Args:
        start: The first frame.
        load: Takes its fields. It returns what it has loaded, and the fields of the
            answer, or raises ConfigError.

    Returns:
        What was loaded, and the answer to send; None if the configuration is wrong.
    """
    sys.path[:] = start.fields["sys_path"]
    try:
        loaded, answer = load(start.fields)
    except ConfigError as error:
        problem = asdict(error.problems[0])
        return None, frame("broken", {"problem": json.dumps(problem, default=str)})
    return loaded, frame("ready", answer)


def require_unbroken(answer: Frame) -> None:
    """Raise ConfigError if a child could not load what its first frame has named."""
    if answer.kind == "broken":
        raise ConfigError([Problem(**json.loads(answer.fields["problem"]))])
