"""The reward function `math`: whether two mathematical answers are equal.

The package math-verify decides whether two answers are equal: 1/2 and 0.5 are, and so
are 2\\sqrt{3} and \\sqrt{12}.

Invariant: a score is 1.0 or 0.0, and a comparison that takes too long is neither. The
time limits of math-verify are switched off, since it calls an answer wrong that it gave
up on; here the process is killed at `reward.deadline_s`, and the score has failed. No
bound on exponents stands in for that: 2^{1000000} is an answer like any other, and
9^{9^9} is not the only one without an end.

These are the marks of a final answer: a box (`\\boxed{}`, `\\fbox{}`), as MATH has it
(arXiv:2103.03874); a line `Answer: ...` whose rest is mathematics, as the prompt of
DAPO wants it (arXiv:2503.14476); and the words "answer is" or "answer:" anywhere. The
last box or such line wins. Without either it is the last of the words with mathematics
behind them, and at last those with any text. So prose after a box, such as "the answer
is consistent", does not replace it. Only a unit of a list is left out of an answer, or
words in `\\text{}`. One letter, such as the t of 3t, is mathematics, and so are i, e
and pi in any font.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from verl_ray.errors import DataError


@dataclass(frozen=True)
class _Expected:
    """A record's answer."""

    quantity: Quantity
    mathematics: list[Any]


class Math:
    """Compares final answers; math-verify is imported when it is built."""

    def __init__(self) -> None:
        """Import math-verify.

        Raises:
            ImportError: It is not installed.
        """
        import math_verify

        # It warns that its time limits are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._package = math_verify
        config = math_verify.LatexExtractionConfig(boxed_match_priority=0)
        # Some of its units are single letters, so that 3t were 3.
        steps = replace(config.normalization_config, units=False)
        self._config = [replace(config, normalization_config=steps)]
        # The responses to a prompt are compared with one answer.
        self._expected = functools.lru_cache(maxsize=1024)(self._read_answer)

    def __call__(self, response: str, answer: str) -> float:
        """Return 1.0 when the final answer of the response equals the answer.

        The answer is a box, as in the solutions of MATH, or as a whole mathematics. A
        response of nothing but the answer counts, too. One without a final answer, or
        with one that cannot be read or compared, scores 0.0. Where both have a unit,
        it is the same one; 3 and 3 cm are equal.

        Raises:
            DataError: The answer cannot be read as mathematics.
        """
        expected = self._expected(answer)
        text = final_answer(response)
        is_marked = text is not None
        if text is None:
            text = response
        if len(text) > LONGEST:
            return 0.0

        own = quantity_of(text)
        if own.plain == expected.quantity.plain:
            return 1.0
        units = {own.unit, expected.quantity.unit} - {""}
        if len(units) > 1:
            return 0.0
        if own.value == expected.quantity.value:
            return 1.0
        if not is_marked:
            return 0.0
        read = self._read(own.text)
        return float(self._package.verify(expected.mathematics, read, **_UNLIMITED))

    def _read_answer(self, answer: str) -> _Expected:
        """Return an answer as a text and as mathematics."""
        _, boxed = last_box(answer) or (0, answer)
        quantity = quantity_of((boxed or "")[: LONGEST + 1])
        is_short = boxed is not None and len(boxed) <= LONGEST
        mathematics = self._read(quantity.text) if is_short else []
        if not mathematics:
            raise DataError(
                f"answer {answer[-80:]!r} cannot be read as mathematics, so math cannot"
                " grade"
            )
        return _Expected(quantity, mathematics)

    def _read(self, text: str) -> list[Any]:
        """Return the text of an answer as mathematics; empty if it is none."""
        if not reads_as_formula(text):
            text = f"\\boxed{{{text}}}"
        read: list[Any] = self._package.parse(
            text, self._config, fallback_mode="no_fallback", parsing_timeout=None
        )
        return read


_UNLIMITED = {"timeout_seconds": None}


# ------------------------------------------------------------------------ final answers


LONGEST = 1000
"""Characters of a final answer that are read; the longest one of MATH-500 has 159."""

# Repeats before something else are bounded, so that a search takes linear time.
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s?\{|\s(?P<bare>[^\s{}$]+))")
_WORDS = re.compile(
    r"\banswer[\s*]{0,4}(?:is\b\s{0,4}:?|[:\uff1a])[\s*]*", re.IGNORECASE
)
_LINE = re.compile(
    r"^[ \t*#>]{0,8}(?:the )?(?:final )?answer[ *]{0,4}[:\uff1a][\s*]*",
    re.IGNORECASE | re.MULTILINE,
)
_DISPLAY = re.compile(r"\$\$.+?\$\$|\\\[.+?\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"\.\s+(?=[A-Z])")

_FORMULA = re.compile(r"\$.+?\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_ONE_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]",
    re.DOTALL,
)
_COMMAND = re.compile(
    r"\\(?:text\w*|mbox|math\w+|operatorname|begin|end)\*?\s?\{[^{}]*\}|\\[A-Za-z]+"
)
# Words that are mathematics, too.
_WORD = re.compile(r"(?!(?:and|or|pi|sqrt|sin|cos|tan|log|ln)(?![a-z]))[A-Za-z]{2,}")

# $5 is a price, unless a second sign makes it $5$.
_CURRENCY = re.compile(r"\\?[$€£](?=\s?-?[0-9.])")
_PERCENT = re.compile(r"\s*\\?%")

_SYNONYMS = (
    "mm millimeter millimetre",
    "cm centimeter centimetre",
    "dm decimeter decimetre",
    "meter metre",
    "km kilometer kilometre",
    "inch inches in",
    "foot feet ft",
    "yard yd",
    "mile mi",
    "mg milligram",
    "gram gm",
    "kg kilogram",
    "pound lb",
    "ounce oz",
    "ton tonne",
    "ml milliliter millilitre",
    "liter litre",
    "gallon gal",
    "millisecond ms",
    "second sec",
    "minute min",
    "hour hr",
    "day",
    "week",
    "month",
    "year yr",
    "cent",
    "dollar usd",
    "euro eur",
    "degree deg",
    "celsius",
    "fahrenheit",
    "radian rad",
    "hz hertz",
    "joule",
    "watt",
    "newton",
    "volt",
    "ohm",
    "unit",
    "acre",
    "hectare",
)
_LISTED = {name: names.split()[0] for names in _SYNONYMS for name in names.split()}
_LISTED |= {"mph": "milehour", "kmh": "kmhour", "kph": "kmhour"}
# They are units behind a stroke or in \text{} only.
_LETTERS = {"m": "meter", "g": "gram", "l": "liter", "s": "second", "h": "hour"}
_NAME = "|".join(sorted(_LISTED, key=len, reverse=True))
_BARE_UNIT = re.compile(
    r"(?P<value>.*(?:[0-9})$\]]|\\pi))\s*"
    rf"(?P<unit>(?:(?:square|sq\.?|cubic|cu\.?)\s)?(?:{_NAME})s?"
    rf"(?:\s?(?:/|\bper\b)\s?(?:h|s|(?:{_NAME})s?))?)"
    r"(?P<power>\^\{?[23]\}?)?",
    re.DOTALL | re.IGNORECASE,
)
_TEXT_UNIT = re.compile(
    r"(?P<value>(?!\\text|\\mbox).*(?:[0-9})$\]]|\\pi|\\circ))(?:\\[,;:! ]|~|\s)*"
    r"\\(?:text(?:rm|normal)?|mbox|mathrm)\s?"
    r"\{[\s~]*(?P<unit>[A-Za-z][A-Za-z ./]*?)\s*\}"
    r"(?P<power>\^\{?[23]\}?)?",
    re.DOTALL,
)
_CONSTANTS = frozenset({"i", "j", "e", "pi"})
_UPRIGHT = re.compile(r"\\(?:mathrm|text(?:rm)?)\s?\{\s*([ije])\s*\}")
_FONT = re.compile(r"\\(?:text(?:rm)?|mbox|mathrm)\s?\{([^{}]*)\}")
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


@dataclass(frozen=True)
class Quantity:
    """A final answer in two parts."""

    text: str
    """The answer without signs, its unit, and marks of the sentence."""
    unit: str
    """The unit in one spelling; empty without one."""
    plain: str
    """The answer with its unit, without white space and changes of the font."""

    @property
    def value(self) -> str:
        """The text without white space."""
        return "".join(self.text.split())


def final_answer(response: str) -> str | None:
    """Return the text of the final answer that a response marks; None without one.

    A box that is not closed is no answer: the response was cut.
    """
    box = last_box(response)
    line = _last_announced(_LINE, response)
    if line is not None and (box is None or line[0] > box[0]):
        return line[1]
    if box is not None:
        return box[1]

    words = _last_announced(_WORDS, response)
    if words is not None:
        return words[1]
    last = _last_match(_WORDS, response)
    return None if last is None else _announced(response, last)


def spelled_answer(response: str) -> str | None:
    """Return the final answer of a response without what does not change its meaning.

    A response of nothing but mathematics, or of one word, is its own answer. Equal
    mathematics in another spelling stays another text.
    """
    text = final_answer(response)
    if text is None:
        is_answer = _is_mathematics(response) or len(response.split()) == 1
        if not is_answer or _BOX.search(response):
            return None
        text = response
    quantity = quantity_of(text[: LONGEST + 1])
    return f"{quantity.value}{quantity.unit}"


def last_box(text: str) -> tuple[int, str | None] | None:
    """Return where the last box begins, and what it holds; None without one.

    A box that is not closed holds None.
    """
    last = _last_match(_BOX, text)
    if last is None:
        return None
    if last["bare"] is not None:
        return last.start(), last["bare"]

    depth = 1
    for place in range(last.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return last.start(), text[last.end() : place]
    return last.start(), None


def quantity_of(text: str) -> Quantity:
    """Return the text of an answer without signs, marks of the sentence and its unit.

    A unit is a word of a list behind a number, a bracket or a brace; in `\\text{}` it
    is any words, such as apples.
    """
    text = _tidy(text)
    plain = "".join(_FONT.sub(r"\1", text).split())
    with_unit = _TEXT_UNIT.fullmatch(text)
    if with_unit is None or with_unit["unit"].lower() in _CONSTANTS:
        with_unit = _BARE_UNIT.fullmatch(text)
    if with_unit is None:
        return Quantity(text, "", plain)
    unit = _unit_of(with_unit["unit"], with_unit["power"])
    return Quantity(_tidy(with_unit["value"]), unit, plain)


def reads_as_formula(text: str) -> bool:
    """Return whether a text has a formula between signs such as `$`."""
    return _FORMULA.search(text) is not None


def _unit_of(words: str, power: str | None) -> str:
    """Return a unit in one spelling: sq. inches and in^2 are inch2.

    It is empty for square units, which are any.
    """
    names = []
    exponent = "".join(re.findall(r"[23]", power or ""))
    known = _LISTED | _LETTERS
    for word in re.findall(r"[a-z]+", words.lower()):
        single = word if word in known else word.removesuffix("s")
        if word in _POWERS:
            exponent = _POWERS[word]
        elif single not in ("per", "unit"):
            names.append(known.get(single, single))
    return "".join(names) + exponent if names else ""


def _last_announced(pattern: re.Pattern[str], text: str) -> tuple[int, str] | None:
    """Return where the last words with mathematics behind them begin, and that."""
    for words in reversed(list(pattern.finditer(text))):
        announced = _announced(text, words)
        if _is_mathematics(announced):
            return words.start(), announced
    return None


def _announced(text: str, words: re.Match[str]) -> str:
    """Return what follows some words: a display, or else the sentence or the line.

    Of a longer text only the beginning is read, one character more than an answer has.
    """
    rest = text[words.end() : words.end() + LONGEST + 1]
    display = _DISPLAY.match(rest)
    if display is not None:
        return display[0]
    line, _, _ = rest.partition("\n")
    return _SENTENCE_END.split(line, maxsplit=1)[0]


def _is_mathematics(text: str) -> bool:
    """Return whether a text is mathematics by its look: without a word of prose."""
    if not 0 < len(text) <= LONGEST:
        return False
    symbols = _COMMAND.sub(" x ", quantity_of(text).text)
    return bool(symbols.strip()) and _WORD.search(symbols) is None


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _tidy(text: str) -> str:
    """Return the text of an answer without signs and marks of the sentence."""
    text = _UPRIGHT.sub(r" \1", text).strip().rstrip(" .,;*")
    formula = _ONE_FORMULA.fullmatch(text)
    if formula is not None:
        text = next(group for group in formula.groups() if group is not None).strip()
    text = _PERCENT.sub("", text).rstrip(" .,;*")
    return _CURRENCY.sub("", text) if text.count("$") % 2 else text
