"""A terminal as a person sees it, by the few codes that the live block uses."""

from __future__ import annotations

import io
import re

_CODES = re.compile(r"\x1b\[([\d?;]*)([A-Za-z])|([^\x1b])")


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


class Screen:
    """Rows of a terminal that never scrolls, and joins wrapped lines when it is resized."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows = [""]
        self.is_wrapped = [False]
        """Whether the text of each row goes on in the next one."""
        self.row = self.column = 0
        self._rest = ""

    @property
    def lines(self) -> list[str]:
        return [row.rstrip() for row in self.rows if row.strip()]

    def feed(self, written: str) -> None:
        # A read may end within a code.
        text = self._rest + written
        end = re.search(r"\x1b(\[[\d?;]*)?$", text)
        self._rest = text[end.start() :] if end else ""
        for argument, code, character in _CODES.findall(
            text[: len(text) - len(self._rest)]
        ):
            if code == "A":
                self.row -= int(argument or 1)
                assert self.row >= 0, "the cursor left the terminal"
            elif code == "K":
                self.rows[self.row] = ""
                self.is_wrapped[self.row] = False
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self._next_row(wrapped=False)
            elif character:
                if self.column == self.width:
                    self._next_row(wrapped=True)
                row = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = (
                    row[: self.column] + character + row[self.column + 1 :]
                )
                self.column += 1

    def _next_row(self, *, wrapped: bool) -> None:
        self.is_wrapped[self.row] = wrapped
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append("")
            self.is_wrapped.append(False)

    def resize(self, width: int) -> None:
        """Break the lines anew; the cursor stays where it was in its line."""
        whole: list[str] = []
        is_begun = False
        for number, (row, goes_on) in enumerate(
            zip(self.rows, self.is_wrapped, strict=True)
        ):
            if not is_begun:
                whole.append("")
            if number == self.row:
                line, place = len(whole) - 1, len(whole[-1]) + self.column
            whole[-1] += row
            is_begun = goes_on

        self.width = width
        self.rows, self.is_wrapped = [], []
        for number, text in enumerate(whole):
            if number == line:
                self.row = len(self.rows) + max(0, place - 1) // width
                self.column = place - (self.row - len(self.rows)) * width
            pieces = [
                text[start : start + width] for start in range(0, len(text), width)
            ]
            self.rows += pieces or [""]
            self.is_wrapped += [True] * (len(pieces) - 1) + [False]
