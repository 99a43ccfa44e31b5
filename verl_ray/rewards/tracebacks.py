"""Tracebacks of a user's functions, short enough for an error or a log.

Invariant: pure functions of errors and texts. Deliberately not here: which frames are
of interest to the user, which the caller knows.
"""

from __future__ import annotations

import re
import traceback

_FRAMES = 4  # innermost frames of a traceback that are worth showing


def short_traceback(
    error: BaseException, skip_files: tuple[str, ...], limit: int = 2000
) -> str:
    """Return the error and the innermost frames that led to it, as text.

    Args:
        skip_files: Outer frames are left out while their files' names begin with one of
            these.
        limit: The text is at most this many characters, from its end.
    """
    report = traceback.TracebackException.from_exception(error)
    # Ends at the first frame that is not ours.
    while report.stack and report.stack[0].filename.startswith(skip_files):
        report.stack.pop(0)
    del report.stack[:-_FRAMES]
    return "".join(report.format(chain=False)).strip()[-limit:]


def last_cause(detail: str) -> str:
    """Return a failed score's detail in one line, with the place of a raised error.

    Args:
        detail: A sentence, or the text of a traceback.
    """
    lines = detail.strip().splitlines() or ["no reason was given"]
    places = re.findall(r'File "([^"]+)", line (\d+)', detail)
    if not places:
        return lines[-1]
    path, line = places[-1]
    return f"{lines[-1]} ({path}, line {line})"
