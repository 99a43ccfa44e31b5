"""Messages between the pool and a scoring process, over one stream socket.

Invariant: scores come in the order of the items, so the item in hand is always the
first one without a score, and its clock started at the time of the last frame.
Deliberately not here: who sends what when (`pool.py`, `child.py`).

To the process: a length and a pickle; first a `Start`, then lists of `Item`. From the
process: frames, each a kind, a time on the monotonic clock that all processes of a
machine share, a value and a text. The pool unpickles no data from the process, which
runs user code.
"""

from __future__ import annotations

import pickle
import struct
from typing import BinaryIO, NamedTuple

LENGTH = struct.Struct("<Q")
# Kind, time in seconds, value, bytes of UTF-8 that follow.
FRAME = struct.Struct("<BddI")

# Kinds of frames. Any other kind is a number of `ScoreHealth`: the score of one item.
READY = 255
"""The functions are imported."""
BROKEN = 254
"""A function cannot be imported; the text is a Problem in JSON."""
STARTED = 253
"""The first item of a message is now in hand."""

# Response, answer, prompt, data source, extra.
Item = tuple[str, str, str, str, dict[str, object]]


class Start(NamedTuple):
    """First message to a process: the functions to import, and their import path."""

    sys_path: list[str]
    functions: dict[str, str]
    """Data source -> spec, as in the configuration."""
    key: str
    """The configuration's section that they are from, for errors to name."""


def frame(kind: int, time_s: float, value: float, text: str) -> bytes:
    """Encode a frame."""
    body = text.encode("utf-8", "backslashreplace")
    return FRAME.pack(kind, time_s, value, len(body)) + body


def message(content: Start | list[Item]) -> bytes:
    """Encode a message to a process."""
    body = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def read_message(stream: BinaryIO) -> bytes | None:
    """Read the pickle of the next message; None when the pool has hung up."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = stream.read(length)
    # A message that breaks off is as good as none.
    return body if len(body) == length else None
