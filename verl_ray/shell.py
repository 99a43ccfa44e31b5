"""Words of commands as a user pastes them into a shell.

Invariant: the shell hands on the words, and Hydra reads the values, that were given; no
character that a path may have (`paths.py`) is an exception. Everything that prints a
command or an override gets its text here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

# Texts that Hydra's grammar reads as they stand. Its words have ASCII letters alone,
# and one without a slash may be a number.
_PLAIN = re.compile(r"[\w./:-]*/[\w./:-]*|[A-Za-z_][\w./:-]*", re.ASCII)
_NO_TEXT = {"null", "true", "false", "nan", "inf"}


def for_shell(words: Iterable[str | tuple[str, object]]) -> str:
    """Return words as they are typed in a shell.

    Args:
        words: The words. A pair is the key and the value of an override.
    """
    return " ".join(
        _quoted_word(word if isinstance(word, str) else override_of(*word))
        for word in words
    )


def _quoted_word(word: str) -> str:
    # Readable quotes around others, unless a shell replaces something between them.
    if "'" in word and set('"$`\\!').isdisjoint(word):
        return f'"{word}"'
    return shlex.quote(word)


def override_of(key: str, value: object) -> str:
    """Return an override that sets a text, a number, a truth value, or null."""
    return f"{key}={in_grammar(value)}"


def table_override(key: str, table: Mapping[str, object]) -> str:
    """Return an override that sets a table of values, as it is typed in a shell."""
    entries = [f"{name}: {in_grammar(value)}" for name, value in table.items()]
    return for_shell([f"{key}={{{', '.join(entries)}}}"])


def in_grammar(value: object) -> str:
    """Return a value as Hydra's grammar has it; a text has quotes if it needs them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()

    text = str(value)
    if not isinstance(value, str):
        return text
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT
    return text if is_plain else as_quoted(text)


def as_quoted(text: str) -> str:
    """Return a text in the quotes of Hydra's grammar, whatever characters it has."""
    # A backslash is one, unless it stands before a quote.
    escaped = re.sub(r"(\\*)('|\Z)", _escaped_quote, text)
    return f"'{escaped}'"


def _escaped_quote(match: re.Match[str]) -> str:
    backslashes, quote = match.groups()
    return 2 * backslashes + ("\\'" if quote else "")
