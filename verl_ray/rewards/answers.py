"""The answer that a built-in reward function reads out of a response.

It is what responses vote with in `maj@k`: two responses with the same answer have equal
texts here. The answers of `math` are texts, too, so 1/2 and 0.5 are two answers.
Held-out scores have it as their entry `pred`, the name under which a user's function
returns its own.

Invariant: the functions here are those that the built-in ones compare by, so responses
with the same answer to a problem have the same score but for the form that
`gsm8k_strict` wants. A function without a reader has no answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from decimal import Decimal

from verl_ray.rewards.built_in import BUILT_IN, by_data_source, usual_function
from verl_ray.rewards.functions import (
    chosen_letter,
    exact_match,
    final_number,
    gsm8k,
    gsm8k_strict,
    marked_number,
    multiple_choice,
)
from verl_ray.rewards.math_answers import Math, spelled_answer

PRED = "pred"
"""Entry of a score that holds the answer, as verl's functions name it."""

Reader = Callable[[str], str | None]
"""Returns the answer in a response; None where it has none."""


def number_text(response: str) -> str | None:
    """Return the final number of a response in one spelling: 1,234.50 is 1234.5."""
    number = final_number(response)
    if number is None:
        return None
    return _spelled(number)


def marked_or_final_number_text(response: str) -> str | None:
    """Return the number that a response marks, see `marked_number`, in one spelling.

    In a response without one it is the final number.
    """
    number = marked_number(response)
    return number_text(response) if number is None else _spelled(number)


def _spelled(number: Decimal) -> str:
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


READERS: Mapping[Callable[..., object], Reader] = {
    exact_match: str.strip,
    gsm8k: number_text,
    gsm8k_strict: marked_or_final_number_text,
    multiple_choice: chosen_letter,
    Math: spelled_answer,
}
"""Built-in function, or class of such ones -> what reads its answers."""


def answer_in(
    function: Callable[..., object], response: str, data_source: str
) -> str | None:
    """Return the answer that a reward function reads; None where there is none."""
    if function is by_data_source:
        function = BUILT_IN[usual_function(data_source)].target
    # An instance of a user's class may have no hash.
    is_whole = inspect.isfunction(function) or inspect.isclass(function)
    reader = READERS.get(function if is_whole else type(function))
    return None if reader is None else reader(response)
