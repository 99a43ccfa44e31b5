"""Built-in reward functions on tables."""

from __future__ import annotations

from decimal import Decimal

import pytest

from verl_ray.errors import DataError
from verl_ray.rewards.functions import REWARD_FUNCTIONS, final_number


def grade(function: str, response: str, answer: str) -> float | None:
    return REWARD_FUNCTIONS[function](response, answer)


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


def test_a_data_source_has_its_usual_function() -> None:
    by_source = REWARD_FUNCTIONS["by_data_source"]
    assert by_source("it is 12", "#### 12", "openai/gsm8k") == 1.0
    assert by_source("it is 12", "12", "sums") == 0.0
    assert by_source("12", "12", "sums") == 1.0
