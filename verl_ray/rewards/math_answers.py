"""The reward function `math`: whether two mathematical answers are equal.

What the final answer of a response is, and what of it is a unit, says
`final_answers.py`. The package math-verify decides whether two answers are equal: 1/2
and 0.5 are, and so are 2\\sqrt{3} and \\sqrt{12}.

Invariant: a score is 1.0 or 0.0, and a comparison that takes too long is neither. The
time limits of math-verify are switched off, since it calls an answer wrong that it gave
up on; here the process is killed at `reward.deadline_s`, and the score has failed. No
bound on exponents stands in for that: 2^{1000000} is an answer like any other, and
9^{9^9} is not the only one without an end.
Deliberately not here: answers that are plain numbers (`functions.py`).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import Any

from verl_ray.errors import DataError
from verl_ray.rewards.final_answers import (
    LONGEST,
    Quantity,
    final_answer,
    last_box,
    quantity_of,
    reads_as_formula,
)


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
