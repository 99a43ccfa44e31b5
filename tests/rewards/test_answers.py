"""The answers that built-in reward functions read, which responses vote with."""

from __future__ import annotations

import pytest

from verl_ray.rewards.built_in import BUILT_IN, answer_in


class UnhashableGrader:
    """A grader of a user."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, response: str) -> float:
        return 1.0


CASES = {
    "exact_match": [(" Paris\n", "Paris"), ("", "")],
    "gsm8k": [
        ("so 3 + 4 = 7.\n#### 1,234.50", "1234.5"),
        ("it costs $0.10", "0.1"),
        ("-0", "0"),
        ("1200", "1200"),
        ("no number", None),
    ],
    "gsm8k_strict": [("7", "7"), ("#### -8.0", "-8"), ("#### 8, not #### so 9", "8")],
    "multiple_choice": [
        ("I think the answer is (C).", "C"),
        ("(B)", "B"),
        ("Both B and C are right", None),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_equal_answers_have_equal_texts(name: str) -> None:
    function = BUILT_IN[name].target
    for response, expected in CASES[name]:
        assert answer_in(function, response, "any") == expected


def test_the_usual_function_of_a_data_source_reads() -> None:
    usual = BUILT_IN["by_data_source"].target
    assert answer_in(usual, "it is 42.0 ", "openai/gsm8k") == "42"
    assert answer_in(usual, "it is 42.0 ", "other") == "it is 42.0"
    assert answer_in(usual, "so \\boxed{42 }", "math_dapo") == "42"
    assert answer_in(lambda response: 1.0, "42", "other") is None
    # An instance may have no hash.
    assert answer_in(UnhashableGrader(), "42", "other") is None


def test_an_instance_is_read_as_its_class_is() -> None:
    function = BUILT_IN["math"].target()
    for response, expected in (
        (r"so it is \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        ("Answer: 50%", "50"),
        ("no mark: 7", None),
    ):
        assert answer_in(function, response, "any") == expected
