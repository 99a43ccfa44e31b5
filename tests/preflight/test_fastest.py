"""The search by lower bounds finds what a search of everything finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_ray.preflight.device_defaults import fastest

Form = tuple[int, bool]
"""The time of a form that fits, and whether it is allowed."""

options = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=3),
    ),
    max_size=6,
)


@given(options)
def test_no_form_of_any_option_is_faster(drawn: list[tuple[int, list[Form]]]) -> None:
    visited: list[int] = []

    def fitted(option: tuple[int, list[Form]]) -> list[Form]:
        visited.append(least_s(option))
        return option[1]

    def least_s(option: tuple[int, list[Form]]) -> int:
        slack, forms = option
        return min((seconds for seconds, _ in forms), default=9) - slack

    best = fastest(
        drawn, least_s=least_s, fitted=fitted, seconds=lambda form: form[0], is_allowed=lambda form: form[1]
    )  # fmt: skip
    allowed = [form[0] for _, forms in drawn for form in forms if form[1]]
    assert (None if best is None else best[0]) == min(allowed, default=None)
    # Options whose bound is not below the best time are not even fitted.
    if best is not None:
        assert visited == sorted(visited) and all(bound <= best[0] for bound in visited)


def test_of_equals_the_first_counts() -> None:
    best = fastest(
        "cab", least_s=lambda _: 1, fitted=lambda name: [name], seconds=lambda _: 1
    )
    assert best == "c"
