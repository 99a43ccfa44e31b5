"""The reward function `math` on answers as models write them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_ray.errors import DataError
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.math_answers import LONGEST, Math, final_answer, spelled_answer
from verl_ray.rewards.pool import ScoringPool
from verl_ray.rewards.request import ScoreRequest


@pytest.fixture(scope="module")
def grade() -> Math:
    return Math()


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so \\boxed{42}", "42"),
        ("\\boxed{42}. No, \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("Answer: 41\nor \\boxed{42}", "42"),
        ("\\boxed{41}\nAnswer: 42", "42"),
        ("\\boxed{41}\n**Final Answer:** $42$", "42"),
        # What the words announce after the box is no line of mathematics.
        ("\\boxed{42}. Let me check: the answer is consistent.", "42"),
        ("\\boxed{42}\nAnswer: as it is above", "42"),
        ("\\boxed{42}\nFor n = 1 the answer is 41.", "42"),
        ("The answer is 42.\nLet me check: the answer is consistent.", "42"),
        ("\\fbox{42}", "so it is \\boxed{42}."),
        ("a bare one is \\boxed 7.", "7"),
        ("42", "42"),
    ],
)
def test_the_last_mark_is_of_the_answer(
    grade: Math, response: str, answer: str
) -> None:
    assert grade(response, answer) == 1.0
    assert grade(response, "\\boxed{100}") == 0.0


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("\\boxed{a{b}c}d}", "a{b}c"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1} and \\boxed{2", None),  # it was cut
        ("Answer: 4\nBecause", "4"),
        ("The answer is: 4", "4"),
        ("**Answer:**\n4", "4"),
        ("ANSWER\N{FULLWIDTH COLON}4", "4"),
        ("The answer is 4. Done.", "4"),
        ("The answer is:\n$$\nx=5\n$$\nDone.", "$$\nx=5\n$$"),
        ("Answer: \\[\nx\n\\]", "\\[\nx\n\\]"),
        ("Answer: $$\nx", "$$"),  # it was cut
        ("the answers: 4", None),
        ("it is 4", None),
    ],
)
def test_the_text_of_a_final_answer(response: str, text: str | None) -> None:
    assert final_answer(response) == text


@pytest.mark.parametrize(
    ("given", "answer", "score"),
    [
        ("0.5", "\\frac{1}{2}", 1.0),
        ("\\dfrac12", "1/2", 1.0),
        ("0.333333", "\\frac13", 1.0),
        ("0.33", "\\frac13", 0.0),
        ("\\sqrt{12}", "2\\sqrt{3}", 1.0),
        ("2\\sqrt{3}", "2", 0.0),
        ("x^2 + 2x + 1", "(x+1)^2", 1.0),
        ("x = 5", "5", 1.0),
        ("5", "x = 5", 1.0),
        ("2, 1", "1, 2", 1.0),  # a set
        ("(2, 1)", "(1, 2)", 0.0),  # a point
        ("(-\\infty, 2) \\cup (3, \\infty)", "(-\\infty,2)\\cup(3,\\infty)", 1.0),
        ("1{,}234", "1234", 1.0),
        ("1,234.50", "1234.5", 1.0),
        ("\\$5", "5", 1.0),
        ("50\\%", "50", 1.0),
        ("50\\%", "50\\%", 1.0),
        ("90^\\circ", "90", 1.0),
        ("3 \\text{ cm}", "3", 1.0),
        ("3 cm", "3", 1.0),
        ("3x", "3", 0.0),
        ("Monday", "\\text{Monday}", 1.0),
        ("\\text{(C)}", "C", 1.0),
        ("7 - 5", "2", 1.0),
        # A letter is no unit, whatever it might stand for.
        ("2", "2 i", 0.0),
        ("2i", "2 i", 1.0),
        ("2\\mathrm{i}", "2i", 1.0),
        ("2\\text{ i}", "2", 0.0),
        ("2 pi", "2", 0.0),
        ("2x", "2 x", 1.0),
        ("3 x", "3", 0.0),
        ("3t", "3", 0.0),
        ("3", "3t", 0.0),
        ("7 a", "7 b", 0.0),
        ("5 apples", "5", 0.0),
        # A unit may be left out, but not replaced.
        ("5 \\text{ apples}", "5", 1.0),
        ("3", "3 cm", 1.0),
        ("3 m", "3 cm", 0.0),
        ("3 \\text{ m}", "3 cm", 0.0),
        ("3 \\text{ m}", "3 meters", 1.0),
        ("3 \\text{ m}", "3 m", 1.0),
        ("3\\,\\mathrm{ft}", "3 feet", 1.0),
        ("60 km/h", "60 kilometers per hour", 1.0),
        ("12\\pi \\text{ cm}^2", "12\\pi \\text{ square cm}", 1.0),
        ("9 \\text{ cm}^2", "9 \\text{ square units}", 1.0),
        ("\\frac12 \\text{ hour}", "0.5", 1.0),
        ("90 degrees", "90^\\circ", 1.0),
        ("1/0", "42", 0.0),
        ("\\frac", "42", 0.0),
        ("", "42", 0.0),
        ("1" * (LONGEST + 1), "42", 0.0),
    ],
)
def test_equal_answers(grade: Math, given: str, answer: str, score: float) -> None:
    assert grade(f"So it is \\boxed{{{given}}}.", answer) == score
    assert grade(f"Thus.\nAnswer: {given}", answer) == score


@pytest.mark.parametrize(
    ("line", "score"),
    [
        ("Answer: $\\frac{42}{1}$", 1.0),
        ("The final answer is $42$. I hope it is correct.", 1.0),
        ("The answer is:\n$$\nx=42\n$$", 1.0),
        ("The answer is\n\\[\nx = 42.\n\\]\nDone.", 1.0),
        ("**Answer: 42**", 1.0),
        ("Answer: \\boxed{42}<|end|>", 1.0),
        ("Answer: $42 dollars.", 1.0),
        ("Answer: \\boxed{43}", 0.0),
        ("Answer: \\boxed{\\text{forty-two}}", 0.0),
        ("The answer is 43 because 42 are left", 0.0),
        ("It is 42", 0.0),
        ("", 0.0),
    ],
)
def test_the_form_of_the_line(grade: Math, line: str, score: float) -> None:
    assert grade(line, "42") == score


@pytest.mark.parametrize(
    "answer", ["", "???", "\\frac", "AB \\parallel CD", "so \\boxed{4", "1" * 1001]
)
def test_an_answer_that_is_no_mathematics_is_refused(grade: Math, answer: str) -> None:
    with pytest.raises(DataError, match="cannot be read as mathematics, so math"):
        grade("\\boxed{4}", answer)


def test_a_long_response_takes_linear_time(grade: Math) -> None:
    # Quadratic time would be minutes.
    for text in ("answer " * 50_000, "answer" + " " * 500_000, "\\boxed{" * 100_000):
        assert grade(text, "42") == 0.0
    assert grade("\\boxed" + " " * 500_000, "42") == 0.0
    for text in ("answer: so " * 50_000, "answer: so\n" * 50_000, "answer:$$" * 50_000):
        assert grade(text, "42") == 0.0


@pytest.mark.parametrize(
    ("response", "vote"),
    [
        ("\\boxed{42}. Let me check: the answer is consistent.", "42"),
        ("The answer is:\n$$\nx = 5\n$$", "x=5"),
        ("The final answer is $42$. I hope it is correct.", "42"),
        ("5", "5"),
        ("x = 5", "x=5"),
        ("Monday", "Monday"),
        ("\\boxed{3 \\text{ feet}}", "3foot"),
        ("Answer: 3 ft", "3foot"),
        ("It is 5", None),
        ("\\boxed{4", None),
        ("", None),
    ],
)
def test_a_response_votes_with_its_answer(response: str, vote: str | None) -> None:
    assert spelled_answer(response) == vote


def test_the_time_limits_of_the_package_are_off() -> None:
    # They are signals, which it refuses to set in a thread.
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(Math(), "\\boxed{5.0}", "5").result() == 1.0


@pytest.mark.processes
def test_a_comparison_without_an_end_is_a_failed_score() -> None:
    endless = "\\boxed{9^{9^{9^9}}}"
    requests = [
        ScoreRequest(response, "42", "p", "math_dapo", {})
        for response in (endless, "\\boxed{42}")
    ]
    # `math` imports its package as it is built, and not within the first deadline.
    with ScoringPool({"default": "math"}, 1, deadline_s=2.0) as pool:
        late, right = pool.score(requests)
    assert (late.health, right.value) == (ScoreHealth.TIMEOUT, 1.0)
