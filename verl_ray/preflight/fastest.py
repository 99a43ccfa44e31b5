"""The search for the fastest option that fits.

Invariant: no option is passed over that could be faster. Of options that take equally
long, an earlier one is preferred. Deliberately not here: what the options are
(`device_defaults.py`, `verl_ray/planning`), and how long they take (`time_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Option = TypeVar("Option")
Fitted = TypeVar("Fitted")


def fastest(
    options: Iterable[Option],
    *,
    least_s: Callable[[Option], float],
    fitted: Callable[[Option], Iterable[Fitted]],
    seconds: Callable[[Fitted], float],
    is_allowed: Callable[[Fitted], bool] = lambda _: True,
) -> Fitted | None:
    """Return the fastest form of an option that fits; None if there is none.

    Options are visited in the order of their lower bounds, until no bound is lower than
    the best time.

    Args:
        options: What to choose among.
        least_s: A lower bound of the time of each form of an option.
        fitted: The forms of an option that fit.
        seconds: The time of such a form.
        is_allowed: Whether nothing else prevents a form; called for those alone that
            are faster than all before them.
    """
    bounds = [(least_s(option), index, option) for index, option in enumerate(options)]
    bounds.sort(key=lambda entry: entry[:2])

    best: Fitted | None = None
    best_s = float("inf")
    for bound, _, option in bounds:
        if bound >= best_s:
            break
        for form in fitted(option):
            form_s = seconds(form)
            if form_s < best_s and is_allowed(form):
                best, best_s = form, form_s
    return best
