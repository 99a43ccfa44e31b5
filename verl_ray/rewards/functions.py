"""Reward functions that compare the text, the number or the letter of two answers.

Invariant: a function returns 1.0 or 0.0, by fixed rules that do not depend on the data
set, so the mean of its scores is an accuracy. It needs the record's answer.
Deliberately not here: the other built-in functions and the list of all (`built_in.py`),
a user's functions (`specs.py`), and where functions run (`pool.py`).
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

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
    return float(final_number(response) == _expected_number(answer, "gsm8k"))


def gsm8k_strict(response: str, answer: str) -> float:
    """Return 1.0 when the number that a response marks is the answer's: `#### 42`.

    So a response is also taught the form of GSM8K's answers, see `marked_number`. It is
    verl's default for GSM8K, with one deviation: numbers are compared, not their texts,
    so that `#### 42.00` and, at the end of a sentence, `#### 42.` are right, too.

    Raises:
        DataError: the answer has no number.
    """
    expected = _expected_number(answer, "gsm8k_strict")
    return float(marked_number(response) == expected)


def _expected_number(answer: str, function: str) -> Decimal:
    expected = final_number(answer)
    if expected is None:
        rule = f"answer {answer[-80:]!r} has no number, so {function} cannot grade"
        raise DataError(rule)
    return expected


_CHOICE = re.compile(
    r"(?:\\boxed\{\s*(?:\\text\{)?|(?i:answer)\s*(?:is|:)\s*\**)\s*[(\[]?([A-Z])\b"
)
_LETTER = re.compile(r"[(\[]?([A-Z])(?:[)\].:](?:\s.*)?)?", re.DOTALL)


def multiple_choice(response: str, answer: str) -> float:
    """Return 1.0 when the response chooses the letter of the answer.

    The choice is the capital letter of the last `\\boxed{C}`, "answer is (C)" or
    "answer: C"; else a response of nothing but a capital letter, in brackets or not. A
    response without a choice scores 0.0. The answer is "C", or "C" with what it stands
    for: "C. Paris", "(C) Paris".

    Raises:
        DataError: the answer does not begin with a letter that stands alone.
    """
    expected = _LETTER.fullmatch(answer.strip())
    if expected is None:
        raise DataError(
            f"answer {answer[:80]!r} is no choice such as C or (C), so multiple_choice"
            " cannot grade"
        )

    return float(chosen_letter(response) == expected[1])


def chosen_letter(response: str) -> str | None:
    """Return the letter that a response chooses, see `multiple_choice`, or None."""
    choices: list[str] = _CHOICE.findall(response)
    if choices:
        return choices[-1]
    alone = response.strip().strip("()[].:* ")
    return alone if re.fullmatch("[A-Z]", alone) else None


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
    text = _plain(text)
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


_MARKED = re.compile(r"#### (-?[0-9.,]+)")


def marked_number(text: str) -> Decimal | None:
    """Return the last number right behind `####` and one space; None without one.

    Between the mark and the number is no word and no sign but a minus. Commas are left
    out wherever they stand. The whole text is searched: earlier versions of verl read
    the last 300 characters only.
    """
    marked = _MARKED.findall(text)
    if not marked:
        return None
    try:
        return Decimal(marked[-1].replace(",", ""))
    # Such as 1.2.3.
    except InvalidOperation:
        return None


def _plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")
