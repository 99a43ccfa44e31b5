"""The built-in reward functions.

Invariant: a built-in function returns 1.0 or 0.0, by fixed rules that do not depend on
the data set, so the mean of its scores is an accuracy. It needs the record's answer.
Deliberately not here: a user's functions (`specs.py`), where functions run (`pool.py`),
and models that score.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from verl_ray.errors import DataError


def exact_match(response: str, answer: str) -> float:
    """Return 1.0 when the texts are equal but for the white space around them."""
    return float(response.strip() == answer.strip())


def gsm8k(response: str, answer: str) -> float:
    """Return 1.0 when the final numbers of the texts are equal, see `final_number`.

    They are compared as numbers: "1,234.50" and "1234.5" are equal. A response without
    a number scores 0.0.

    Raises:
        DataError: the answer has no number.
    """
    expected = final_number(answer)
    if expected is None:
        raise DataError(f"answer {answer[-80:]!r} has no number, so gsm8k cannot grade")
    return float(final_number(response) == expected)


_NUMBER = re.compile(
    # A minus sign; not the operator in `7-3` or `7 - 3`, nor the hyphen in `mid-30`.
    r"(?P<sign>(?<![\w)])-(?!\s))?"
    r"[$€£]?\s?(?P<late_sign>(?<=[$€£])-)?"  # -$5 and $-5
    # 1,234,567 or 1234567 or .5
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))"
    r"(?P<fraction>\.[0-9]+)?"
)


def final_number(text: str) -> Decimal | None:
    """Return the number behind the last `####`, else the last number of `text`.

    Currency and percent signs, commas between groups of three digits, and a full stop
    at the end are not part of a number; exponents and fractions (`3/4`) are not read as
    one number. A text without a number has None.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    _, mark, tail = text.rpartition("####")

    match = _NUMBER.search(tail) if mark else None
    if match is None:
        matches = list(_NUMBER.finditer(text))
        if not matches:
            return None
        match = matches[-1]

    # ".5" has no digits before the point
    digits = match["digits"].replace(",", "") or "0"
    fraction = match["fraction"] or ""
    number = Decimal(digits + fraction)
    if match["sign"] or match["late_sign"]:
        return -number
    return number


_OF_SOURCE = {"gsm8k": gsm8k, "openai/gsm8k": gsm8k, "word_problems": gsm8k}


def by_data_source(response: str, answer: str, data_source: str) -> float:
    """Grade as the usual function of a data source does.

    It is `gsm8k` for gsm8k, openai/gsm8k and word_problems, else `exact_match`.
    """
    return _OF_SOURCE.get(data_source, exact_match)(response, answer)


REWARD_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "by_data_source": by_data_source,
    "exact_match": exact_match,
    "gsm8k": gsm8k,
}


def function_of(spec: str, data_source: str) -> Callable[[str, str], float] | None:
    """Return the built-in function that grades a data source; None for no built-in one.

    Args:
        spec: The name of a function, as reward.functions has it.
    """
    if spec == by_data_source.__name__:
        return _OF_SOURCE.get(data_source, exact_match)
    return REWARD_FUNCTIONS.get(spec)
