"""What the pool and a scoring process say to each other, over one stream socket.

Invariant: answers come in the order of the items, so the item in hand is always the first unanswered one, and its
clock started at the time of the last frame. Deliberately not here: who speaks when (`process.py`, `child.py`).

To the process: a length and a pickle; first a `Start`, then lists of `Item`. From the process: frames, each a kind, a
time on the monotonic clock that all processes of a machine share, a value and a text. Nothing from there is unpickled.
"""

from __future__ import annotations

import pickle
import struct
from typing import BinaryIO, NamedTuple

LENGTH = struct.Struct("<Q")
FRAME = struct.Struct("<BddI")  # kind, time in seconds, value, bytes of UTF-8 that follow

# Kinds of frames besides the numbers of `Health`, which answer one item:
READY = 255  # the functions are imported
BROKEN = 254  # a function cannot be imported; the text is a Problem in JSON
STARTED = 253  # the first item of a message is now in hand

Item = tuple[str, str, str, str, dict[str, object]]  # response, answer, prompt, data source, extra


class Start(NamedTuple):
    """The first message: what to import, and where from."""

    sys_path: list[str]
    functions: dict[str, str]
    """Data source -> spec, as in the configuration."""
    key: str
    """The configuration's section that they are from, for errors to name."""


def frame(kind: int, time_s: float, value: float, text: str) -> bytes:
    body = text.encode("utf-8", "backslashreplace")
    return FRAME.pack(kind, time_s, value, len(body)) + body


def message(content: Start | list[Item]) -> bytes:
    body = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def read_message(stream: BinaryIO) -> bytes | None:
    """The pickle of the next message; None when the other side has hung up."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None
