"""Built-in reward functions on tables."""

from __future__ import annotations

from decimal import Decimal

import pytest

from verl_ray.errors import DataError
from verl_ray.rewards.functions import final_number
from verl_ray.rewards.specs import load


def grade(function: str, response: str, answer: str) -> float | None:
    return load(function).function(response, answer)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("12", "12", 1.0),
        (" 12\n", "12", 1.0),
        ("12", "12 ", 1.0),
        ("12.0", "12", 0.0),
        ("1 2", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_exact_match(response: str, answer: str, score: float) -> None:
    assert grade("exact_match", response, answer) == score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        (
            "#### 18 dollars for 3 days",
            "18",
        ),  # the number behind the mark, not the last one
        ("#### 1\nwait\n#### 2", "2"),
        ("It is 7. ####", "7"),
        ("####", None),
        ("the answer is 72.", "72"),
        ("3 apples and 4 pears", "4"),
        ("#### 0", "0"),
        ("5 #### 0 of 9", "0"),
        ("$1,450,000.", "1450000"),
        ("1,2", "2"),  # a list, not a number
        ("1,2345", "2345"),
        ("12,345,678.90", "12345678.90"),
        ("1234567", "1234567"),
        ("007", "7"),
        ("3.50", "3.5"),
        (".5", "0.5"),
        ("$.75", "0.75"),
        ("50%", "50"),
        ("\\boxed{42}", "42"),
        ("-5", "-5"),
        ("7 - 5", "5"),
        ("x=-5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\N{MINUS SIGN}5", "-5"),
        ("10-3", "3"),  # an operator
        ("10 - 3 = 7", "7"),
        ("mid-30", "30"),  # a hyphen
        ("(2)-1", "1"),
        ("v1.2.3", "3"),
        ("3/4", "4"),
        ("\N{ARABIC-INDIC DIGIT THREE}", None),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("so 20 + 22 = 42.\n#### 42", "42", 1.0),
        ("#### $1,234.50", "1234.5", 1.0),
        ("#### 42", "6 * 7 = <<6*7=42>>42\n#### 42", 1.0),
        ("#### 42.5", "42", 0.0),
        ("#### 0.30000000000000001", "0.3", 0.0),  # decimal numbers, compared exactly
        ("#### -42", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("9" * 100_000, "42", 0.0),
    ],
)
def test_gsm8k(response: str, answer: str, score: float) -> None:
    assert grade("gsm8k", response, answer) == score


def test_gsm8k_refuses_an_answer_without_a_number() -> None:
    with pytest.raises(DataError, match=r"answer 'forty' has no number"):
        grade("gsm8k", "#### 40", "forty")


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("so it is 42.\n#### 42", 1.0),
        ("#### 42.00", 1.0),
        ("#### 42.", 1.0),
        ("#### 4,2", 1.0),
        ("#### 42 apples", 1.0),
        ("#### 42\nThat is #### it.", 1.0),
        ("#### 41\nno: #### 42", 1.0),
        ("so it is 42.", 0.0),  # not marked
        ("It is 42. ####", 0.0),
        ("#### 41, not 42", 0.0),
        ("#### so I think it is 42", 0.0),
        ("####42", 0.0),
        ("####  42", 0.0),
        ("#### $42", 0.0),
        ("#### +42", 0.0),
        ("#### 42\n#### 4.2.", 0.0),
        ("#### 42\n#### 4.2.1", 0.0),
        ("#### 42\n#### .", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_strict_wants_the_mark(response: str, score: float) -> None:
    assert grade("gsm8k_strict", response, "#### 42") == score


def prose(length: int) -> str:
    """Return text without a digit."""
    return ("which is what was asked for. " * (length // 29 + 1))[:length]


# What verl's own tests want of its function, which once read 300 characters.
@pytest.mark.parametrize("length", [0, 1, 299, 300, 4000])
def test_as_in_verl_the_place_of_the_answer_does_not_matter(length: int) -> None:
    text = prose(length)
    for response, score in (
        (f"2 + 40 = 42.\n#### 42\n{text}", 1.0),
        (f"{text}#### 7\nwait, once more.\n#### 42\n{text}", 1.0),
        (f"2 + 40 = 41.\n#### 41\n{text}", 0.0),
        (f"the answer is 42 {text}", 0.0),
        (text, 0.0),
    ):
        assert grade("gsm8k_strict", response, "42") == score
    assert grade("gsm8k", f"the answer is 42 {text}", "42") == 1.0
    assert grade("gsm8k", text, "42") == 0.0
    assert grade("gsm8k_strict", f"#### 1,234\n{text}", "1234") == 1.0


def test_as_in_verl_a_long_number_is_whole() -> None:
    long = "1234567890123456789"
    text = prose(310 - len(long) // 2)
    assert grade("gsm8k_strict", f"{text}#### {long}", long) == 1.0
    assert grade("gsm8k", f"{text}the answer is {long}", long) == 1.0
    assert grade("gsm8k_strict", f"{text}#### {long}", long[9:]) == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("The answer is (C).", 1.0),
        ("answer: C", 1.0),
        ("The answer is a secret", 0.0),  # an article
        ("**Answer: C**", 1.0),
        ("The final answer is \\boxed{C}.", 1.0),
        ("\\boxed{\\text{C}}", 1.0),
        ("(C)", 1.0),
        ("C", 1.0),
        ("The answer is B. Wait, the answer is C.", 1.0),
        ("The answer is C. Wait, the answer is B.", 0.0),
        ("The answer is Canada", 0.0),  # a word, not a letter
        ("A capital city is C", 0.0),
        ("c", 0.0),
        ("", 0.0),
    ],
)
def test_multiple_choice(response: str, score: float) -> None:
    for answer in ("C", "(C)", "C. Paris", "C) Paris"):
        assert grade("multiple_choice", response, answer) == score


def test_multiple_choice_refuses_an_answer_without_a_letter() -> None:
    for answer in ("Paris", "A city", "", "3"):
        with pytest.raises(DataError, match="is no choice such as C"):
            grade("multiple_choice", "C", answer)
