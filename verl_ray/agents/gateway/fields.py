"""Fields of the JSON objects that clients send.

Invariant: a field is read once, by its type, or refused by its name. A field that is
null is absent.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from verl_ray.agents.contract import MOST_NESTED, nests_too_deep
from verl_ray.errors import CallRefused

_KINDS = {
    str: "a text",
    int: "an integer",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}

_LARGEST = 2.0**64

MOST_ID = 256
_MOST_STOP = 1024

_NO_TEXT = "the policy reads texts alone; leave it out"
_ITS_OWN_STATE = "send the whole conversation in messages or input"
_UNLIKE_THE_POLICY = "it changes what is sampled, and the run's own settings hold"

REASONS: Mapping[str, str] = {
    "audio": _NO_TEXT,
    "background": "an answer is sent in its own request; leave it out",
    "chat_template_kwargs": "set the column chat_template_kwargs of the record",
    "container": _ITS_OWN_STATE,
    "context_management": "shorten the conversation in the agent; leave it out",
    "conversation": _ITS_OWN_STATE,
    "disable_parallel_tool_use": "a turn may have several calls; leave it out",
    "encrypted_content": "thoughts are read as texts, in content; leave it out",
    "frequency_penalty": _UNLIKE_THE_POLICY,
    "function_call": "use tool_choice and tool_calls",
    "functions": "use tools",
    "include": "the answer holds texts and calls alone; leave it out",
    "logit_bias": _UNLIKE_THE_POLICY,
    "mcp_servers": "call these servers in the agent, and name their tools in tools",
    "min_p": _UNLIKE_THE_POLICY,
    "modalities": "the policy writes texts alone; leave it out",
    "parallel_tool_calls": "a turn may have several calls; leave it out",
    "presence_penalty": _UNLIKE_THE_POLICY,
    "prompt": _ITS_OWN_STATE,
    "refusal": "write it in content",
    "repetition_penalty": _UNLIKE_THE_POLICY,
    "top_logprobs": "log-probs are those of the sampled tokens; set it to 0",
    "truncation": "shorten the conversation in the agent; set it to disabled",
}
"""What to do in place of a field that is refused, by its name."""

_T = TypeVar("_T")


def is_sound(value: object) -> bool:
    """Return whether a value of JSON has UTF-8 and few enough levels for templates."""
    # Half of a surrogate pair, which JSON can spell, is no text.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return not nests_too_deep(value)


class Fields:
    """The fields of a JSON object that no one has read yet."""

    def __init__(
        self, value: object, place: str = "", unheeded: set[str] | None = None
    ) -> None:
        """Take a value, and where it stands in the body of its request.

        Args:
            value: The JSON object.
            place: Where it stands; empty for the body itself.
            unheeded: The set of its body; see `unheeded`.

        Raises:
            CallRefused: The value is no object.
        """
        if not isinstance(value, dict):
            what = f"expected an object, found {reprlib.repr(value)}"
            raise CallRefused(f"{place or 'the body'}: {what}", place or None)
        self._values = {name: each for name, each in value.items() if each is not None}
        self._place = place
        self.unheeded: set[str] = set() if unheeded is None else unheeded
        """Places of fields of the whole body that would change what is sampled
        elsewhere, and have no effect here."""

    def __len__(self) -> int:
        """Return how many fields are not read yet."""
        return len(self._values)

    @classmethod
    def in_body(cls, body: object) -> Fields:
        """Return the fields of a request's body.

        Raises:
            CallRefused: The body is no object, has a text that is no Unicode, or has
                thousands of levels.
        """
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            why = "a text is no Unicode, or there are too many levels"
            raise CallRefused(f"the body cannot be read: {why}") from None
        return cls(body)

    def place(self, name: str) -> str:
        """Return where a field stands in the body of its request."""
        return f"{self._place}.{name}" if self._place else name

    def refusal(self, name: str, why: str) -> CallRefused:
        """Return the error that refuses a field."""
        return CallRefused(f"{self.place(name)}: {why}", self.place(name))

    def take(self, name: str, kind: type[_T]) -> _T | None:
        """Return a field of this type, or None if it is absent.

        Raises:
            CallRefused: It is of another type, or an object has too many levels.
        """
        value = self._values.pop(name, None)
        if value is None:
            return None
        # A bool is an int for isinstance, but no number.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            what = f"expected {_KINDS[kind]}, found {reprlib.repr(value)}"
            raise self.refusal(name, what)
        if kind is dict and nests_too_deep(value):
            raise self.refusal(name, f"it has more than {MOST_NESTED} levels")
        return value

    def require(self, name: str, kind: type[_T]) -> _T:
        """Return a field of this type.

        Raises:
            CallRefused: It is absent or of another type.
        """
        value = self.take(name, kind)
        if value is None:
            raise self.refusal(name, f"expected {_KINDS[kind]}, but it is missing")
        return value

    def word(self, name: str, most: int = MOST_ID) -> str | None:
        """Return a field that is a short text, or None.

        Names, types and ids are: no template needs to write them, so that the context
        does not bound them.

        Raises:
            CallRefused: It is no text, or has more characters than `most`.
        """
        text = self.take(name, str)
        if text is not None and len(text) > most:
            why = f"expected at most {most} characters, found {len(text)}"
            raise self.refusal(name, why)
        return text

    def require_word(self, name: str, most: int = MOST_ID) -> str:
        """Return a field that is a short text.

        Raises:
            CallRefused: It is absent, no text, or too long.
        """
        text = self.word(name, most)
        if text is None:
            raise self.refusal(name, f"expected {_KINDS[str]}, but it is missing")
        return text

    def count(self, name: str, most: float = _LARGEST) -> int | None:
        """Return a field that is a number of things, from 1 to `most`, or None.

        Raises:
            CallRefused: It is no such number.
        """
        value = self.take(name, int)
        if value is not None and not 1 <= value <= most:
            bounds = "at least 1" if most == _LARGEST else f"1 to {most}"
            raise self.refusal(name, f"expected {bounds}, found {value}")
        return value

    def number(self, name: str) -> float | None:
        """Return a field that is a number, or None.

        Raises:
            CallRefused: It is no number, or not finite.
        """
        value = self._values.pop(name, None)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # A comparison with NaN is false.
        if not is_number or not -_LARGEST <= value <= _LARGEST:
            raise self.refusal(name, f"expected a number, found {reprlib.repr(value)}")
        number: float = value
        return number

    def texts(self, name: str, most: int) -> list[str]:
        """Return a field that is a text or at most `most` of them, none of them empty.

        Raises:
            CallRefused: It is anything else, or one is long.
        """
        value = self._values.pop(name, [])
        texts = [value] if isinstance(value, str) else value
        is_list = isinstance(texts, list) and len(texts) <= most
        if not is_list or not all(isinstance(each, str) and each for each in texts):
            what = f"expected at most {most} texts, none of them empty"
            raise self.refusal(name, f"{what}, found {reprlib.repr(value)}")
        longest = max(map(len, texts), default=0)
        if longest > _MOST_STOP:
            why = f"expected at most {_MOST_STOP} characters each, found {longest}"
            raise self.refusal(name, why)
        return list(texts)

    def within(self, name: str) -> Fields:
        """Return the fields of a field that is an object; none if it is absent.

        Raises:
            CallRefused: It is no object.
        """
        return Fields(self._values.pop(name, {}), self.place(name), self.unheeded)

    def typed(self, name: str) -> Fields:
        """Return the fields of an object that may be written as its type alone.

        Raises:
            CallRefused: It is neither a text nor an object.
        """
        value = self._values.get(name)
        if isinstance(value, str):
            self._values[name] = {"type": value}
        return self.within(name)

    def parts(self, name: str) -> list[Fields]:
        """Return the fields of each object of a list, which is empty if it is absent.

        Raises:
            CallRefused: It is no list of objects.
        """
        place = self.place(name)
        values = self.take(name, list) or []
        return [
            Fields(each, f"{place}[{i}]", self.unheeded)
            for i, each in enumerate(values)
        ]

    def content(self, name: str, kind: str = "text") -> list[Fields]:
        """Return the parts of a content; a text is a part of this type.

        Raises:
            CallRefused: It is neither a text nor a list of objects.
        """
        value = self._values.get(name)
        if isinstance(value, str):
            self._values[name] = [{"type": kind, "text": value}]
        return self.parts(name)

    def pass_over(self, name: str, neutral: Sequence[Any] = ()) -> None:
        """Note a field that has no effect, unless it says what holds in any case.

        Args:
            name: A field that would change what is sampled elsewhere.
            neutral: Values that say no more than its absence does.
        """
        value = self._values.pop(name, None)
        if value is not None and value not in neutral:
            # Without the numbers of tools, of which there may be many.
            self.unheeded.add(re.sub(r"\[\d+\]", "", self.place(name)))

    def require_type(self, kind: str) -> None:
        """Refuse an object of another type; if it says none, it is of this type.

        Raises:
            CallRefused: The type is another.
        """
        named = self.word("type")
        if named not in (None, kind):
            why = f"expected {kind!r}, found {named!r}, which is not served"
            raise self.refusal("type", why)

    def close(
        self,
        without_effect: Collection[str] = (),
        neutral: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    ) -> None:
        """Refuse the first field that nothing has read.

        Args:
            without_effect: Fields that change no token, whatever their values are.
            neutral: Fields that change nothing at these values.

        Raises:
            CallRefused: There is such a field.
        """
        for name, value in self._values.items():
            if name in without_effect or value in neutral.get(name, ()):
                continue
            why = REASONS.get(name, "it is not served here; leave it out")
            raise self.refusal(name, f"found {reprlib.repr(value)}; {why}")
