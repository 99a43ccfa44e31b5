"""The lines that this process prints, as they pass by, and its last warnings.

Warnings are printed wherever they arise, on stderr, and begin with the same word. Who
shows the run shows the last of them, too: the live block, and the status of the run.

Invariant: a stream that is looked at here passes on what is written to it, also in a
forked process. The beginning of a line is held back until its end, or that of the
block. Only Python's own writes to `sys.stdout` and `sys.stderr` pass by here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

_WARNING = "warning: "
_KEPT = 5


class LineStream:
    """A text stream in the place of another one, which hands on whole lines.

    A line that is written over (by `\\r`, as a progress bar does) counts as it is at
    its end, and until then nothing of it appears.
    """

    def __init__(self, stream: TextIO, take: Callable[[str], None]) -> None:
        """Stand for a stream.

        Args:
            stream: The stream, which answers everything but writes.
            take: Receives each line without its newline.
        """
        self.stream = stream
        self._take = take
        self._begun = ""
        self._lock = threading.RLock()
        self._process = os.getpid()

    def write(self, text: str) -> int:
        """Hand on the lines that this text ends; return its length."""
        if os.getpid() != self._process:
            return self.stream.write(text)
        with self._lock:
            *lines, begun = (self._begun + text).split("\n")
            # A bar writes one line for hours. What comes next may be its newline.
            self._begun = _as_seen(begun) + ("\r" if begun.endswith("\r") else "")
        for line in lines:
            self._take(_as_seen(line))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Let the stream write what it has."""
        self.stream.flush()

    def finish(self) -> None:
        """Hand on a line that has no end."""
        with self._lock:
            line, self._begun = self._begun, ""
        if line:
            self._take(_as_seen(line))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _as_seen(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def printable(text: str) -> str:
    """Return text whose control characters are spelled out, but for newlines."""
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in text
    )


@contextlib.contextmanager
def replaced(name: str, take: Callable[[str], None]) -> Iterator[None]:
    """Hand on the lines of sys.stdout or sys.stderr within the block.

    Args:
        name: "stdout" or "stderr".
        take: Receives each line without its newline, instead of the stream.
    """
    lines = LineStream(getattr(sys, name), take)
    setattr(sys, name, cast(TextIO, lines))
    try:
        yield
    finally:
        # Somebody else may have put another stream in place.
        if getattr(sys, name) is lines:
            setattr(sys, name, lines.stream)
        lines.finish()


class Warnings:
    """The last warnings that a process has printed."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=_KEPT)

    @property
    def last(self) -> tuple[str, ...]:
        """The last few, each a line without the word; any thread may ask."""
        return tuple(self._last)

    def look_at(self, line: str) -> None:
        """Keep a line of stderr if it is a warning."""
        if line.startswith(_WARNING):
            self._last.append(line.removeprefix(_WARNING))

    def forget(self) -> None:
        """Forget the warnings of earlier work of this process."""
        self._last.clear()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the warnings of this block, and forget those of earlier ones."""
        self.forget()
        stream = sys.stderr

        def pass_on(line: str) -> None:
            self.look_at(line)
            stream.write(f"{line}\n")
            stream.flush()

        with replaced("stderr", pass_on):
            yield


WARNINGS = Warnings()
"""The warnings of this process."""
