"""Lines of JSON: the parts of a text between its newlines.

Invariant: nothing else ends a line. A text in JSON may hold U+2028, U+2029 or U+0085 as
they are, at which `str.splitlines` would part it.
"""

from __future__ import annotations

from typing import AnyStr


def lines_of(text: AnyStr) -> list[AnyStr]:
    """Return the lines of a text, or of its bytes, without those that are blank."""
    newline = "\n" if isinstance(text, str) else b"\n"
    return [line for line in text.split(newline) if line.strip()]
