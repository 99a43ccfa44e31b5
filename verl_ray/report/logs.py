"""Errors in the logs of a run's processes.

Invariant: a bounded number of bytes is read, those written last, and lines that are
alike but for their numbers count as the same error.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_BYTES_PER_LOG = 1 << 20
_BYTES = 16 << 20
_MOST_ERRORS = 100
_LONGEST = 400
# An exception with its message, the name of one alone, and what no exception says.
_ERROR = re.compile(
    r"\b\w*(?:Error|Exception): |\b\w+(?:Error|Exception)\s*$"
    r"|CRITICAL|Segmentation fault|ut of memory"
)
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class LogError:
    """Lines of a log that are alike but for their numbers, and name an error."""

    file: str
    text: str
    """The last such line, at most 400 characters of it."""

    count: int


def read_log_errors(folder: Path, damage: list[str]) -> list[LogError]:
    """Return the errors in the ends of the logs, those of the newest log last.

    Args:
        folder: Folder of the logs, which may be missing.
        damage: Receives a sentence for what cannot be read, or is left out.
    """
    written: list[tuple[int, Path]] = []
    for path in sorted(folder.glob("*.log")):
        try:
            written.append((path.stat().st_mtime_ns, path))
        except OSError as error:
            damage.append(f"logs/{path.name} cannot be read: {error}")

    newest_first = [path for _, path in sorted(written, reverse=True)]
    errors: list[LogError] = []
    remaining_bytes = _BYTES
    for place, path in enumerate(newest_first):
        if remaining_bytes <= 0:
            count = len(newest_first) - place
            damage.append(f"logs/: the {count} oldest were not searched for errors")
            break
        try:
            content = _end_of(path, min(_BYTES_PER_LOG, remaining_bytes))
        except OSError as error:
            damage.append(f"logs/{path.name} cannot be read: {error}")
            continue
        remaining_bytes -= len(content)
        text = content.decode("utf-8", errors="replace")
        errors = [*_errors_in(path.name, text), *errors]
    return errors[-_MOST_ERRORS:]


def _end_of(path: Path, num_bytes: int) -> bytes:
    """Return the last bytes of a file.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        # It may grow meanwhile.
        return file.read(num_bytes)


def _errors_in(name: str, text: str) -> list[LogError]:
    counts: Counter[str] = Counter()
    last: dict[str, str] = {}
    for line in text.splitlines():
        if _ERROR.search(line):
            kind = _NUMBERS.sub("0", line)[:_LONGEST]
            counts[kind] += 1
            last[kind] = line[:_LONGEST]
    return [LogError(name, last[kind], count) for kind, count in counts.items()]
