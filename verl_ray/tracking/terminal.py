"""Lines at the end of a terminal that are painted again and again, with text above.

Invariant: the lines stand on the terminal once, below everything else that this process
prints, also after its size has changed; when they end, they are gone. They are painted
by one thread at a time, and each time with one write. The cursor stays visible, so that
nothing is amiss after a process that is killed. What a process writes to the terminal
by other ways than `sys.stdout` and `sys.stderr` is not noticed. What it prints there
appears also if the lines cannot be made, but the beginning of a line is held back until
its end. `rich.live` does not hold this (ARCHITECTURE.md, the live block).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from verl_ray.profiling.output_lines import replaced

_REFRESH_S = 0.5

_FEWEST_COLUMNS = 20


def is_live(stream: TextIO) -> bool:
    """Return whether a stream is a terminal on which lines can be painted again."""
    is_dumb = os.environ.get("TERM", "dumb").lower() in ("", "dumb", "unknown")
    is_record = os.environ.get("CI", "").lower() not in ("", "0", "false")
    # Bars and spinners have characters that other encodings lack.
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    is_unicode = encoding.replace("-", "") == "utf8"
    return stream.isatty() and is_unicode and not is_dumb and not is_record


class LiveLines:
    """The last lines of a terminal."""

    def __init__(
        self, stream: TextIO, lines: Callable[[int, int], Sequence[Text]]
    ) -> None:
        """Stand for a terminal, and paint nothing yet.

        Args:
            stream: The terminal.
            lines: Function that returns the lines for so many columns and rows. Any
                thread calls it.
        """
        self._stream = stream
        self._lines = lines
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._painted: list[int] = []
        """Width in columns of each line that stands on the terminal."""

        self._is_painting = False
        self._waiting: list[Text] = []
        """Text that a signal's handler printed while its thread painted."""

        self._have_failed = False
        """Whether the lines could not be made once, which was said."""

    @property
    def columns(self) -> int:
        """Number of columns of the terminal now."""
        return self._console.width

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Paint the lines within the block, and print above them what it prints."""
        painter = threading.Thread(target=self._repaint, name="terminal", daemon=True)
        with contextlib.ExitStack() as replacements:
            for name in ("stdout", "stderr"):
                if _is_same_terminal(getattr(sys, name), self._stream):
                    above = replaced(name, self._print_line)
                    replacements.enter_context(above)
            self.paint()
            painter.start()
            try:
                yield
            finally:
                self._ended.set()
                painter.join()
                self.paint()

    def paint(self, above: Sequence[Text] = ()) -> None:
        """Paint the lines anew, below the text `above`, which stays.

        A terminal that has closed is left alone.
        """
        with self._lock:
            self._waiting += above
            if self._is_painting:
                return
            self._is_painting = True
            try:
                # Ends once nothing was printed while it painted.
                while True:
                    text, self._waiting = self._waiting, []
                    self._paint_once(text)
                    if not self._waiting:
                        return
            finally:
                self._is_painting = False

    def _paint_once(self, above: Sequence[Text]) -> None:
        with contextlib.suppress(OSError, ValueError):
            size = self._console.size
            lines = self._lines_of(size.width, size.height)
            with self._console:
                self._console.control(self._erasure(size.width))
                for text in above:
                    self._console.print(text, soft_wrap=True)
                if lines:
                    block = Text("\n").join(lines)
                    self._console.print(block, end="", soft_wrap=True)
            self._painted = [line.cell_len for line in lines]

    def _lines_of(self, width: int, height: int) -> list[Text]:
        """Return the lines for a terminal; none if they cannot be made."""
        if self._ended.is_set():
            return []
        # A line of full width would be joined with the next by some terminals.
        columns = max(_FEWEST_COLUMNS, width) - 1
        rows = max(1, height - 1)
        # A mistake in what is shown of the work neither ends it nor hides its words.
        try:
            lines = list(self._lines(columns, rows))[:rows]
            for line in lines:
                line.truncate(columns, overflow="ellipsis")
        except Exception as error:
            if not self._have_failed:
                self._have_failed = True
                self._waiting.append(Text(f"the block cannot be shown: {error!r}"))
            return []
        return lines

    def _erasure(self, columns: int) -> Control:
        """Return what removes the painted lines from a terminal of this width.

        A terminal that has become narrower shows a line in several rows.
        """
        if not self._painted:
            return Control()
        rows = sum(max(1, -(-width // columns)) for width in self._painted)
        erase = (ControlType.ERASE_IN_LINE, 2)
        up = (ControlType.CURSOR_UP, 1)
        return Control(ControlType.CARRIAGE_RETURN, erase, *((up, erase) * (rows - 1)))

    def _print_line(self, line: str) -> None:
        # Output of others may hold what is no text.
        text = line.encode(errors="backslashreplace").decode()
        self.paint([Text.from_ansi(text)])

    def _repaint(self) -> None:
        # Ends with the block. What is painted changes with the time, too.
        while not self._ended.wait(_REFRESH_S):
            self.paint()


def _is_same_terminal(stream: TextIO, terminal: TextIO) -> bool:
    """Return whether a stream writes to this terminal."""
    if stream is terminal:
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):
        device = os.fstat(terminal.fileno()).st_rdev
        return stream.isatty() and os.fstat(stream.fileno()).st_rdev == device
    return False
