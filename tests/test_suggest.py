"""Suggestions: near spellings and near numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.suggest import closest, did_you_mean, either, nearest_divisors


def test_a_misspelt_key_finds_its_section() -> None:
    keys = [
        "rollout.group_size",
        "evaluation.group_size",
        "run.seed",
        "actor.mini_batch_size",
    ]
    assert closest("rolout.group_size", keys)[0] == "rollout.group_size"
    assert closest("actor.ppo_minibatch_size", keys)[0] == "actor.mini_batch_size"
    assert closest("zzz", keys) == []


def test_short_lists_of_choices_are_shown_in_full() -> None:
    assert (
        did_you_mean("fspd", ["engine", "fsdp"], "backend")
        == "Did you mean fsdp? There is engine, fsdp."
    )
    assert (
        did_you_mean("zzz", ["engine", "fsdp"], "backend") == "There is engine, fsdp."
    )
    assert did_you_mean("zzz", [], "backend") == "There is no backend here."


def test_a_guess_is_no_company_for_a_wrong_letter() -> None:
    keys = ["actor.optimizer.lr", "critic.optimizer.lr", "lora@actor.lora"]
    assert closest("actor.optim.lr", keys) == ["actor.optimizer.lr"]


def test_a_last_part_that_says_nothing_is_no_likeness() -> None:
    assert closest("checkpointing.enabled", ["rollout.endpoint.enabled"]) == []
    near = closest("rollout.endpont.enabled", ["rollout.endpoint.enabled"])
    assert near == ["rollout.endpoint.enabled"]


def test_of_a_long_section_the_nearest_names_are_shown() -> None:
    keys = [f"rollout.{letter * 20}" for letter in "abcdefgh"]
    nearest = "There is rollout.hhhhhhhhhhhhhhhhhhhh, "
    shown = did_you_mean("rollout.hxyzvwux", keys, "key")
    assert shown.startswith(nearest) and shown.endswith(" and 3 more.")


def test_long_lists_are_shown_by_their_beginnings() -> None:
    keys = [
        f"{section}.some_long_key_{number}"
        for section in ("run", "data")
        for number in range(20)
    ]
    assert did_you_mean("qqq", keys, "key") == "Every key begins with one of data, run."

    # Names without a point have no sections.
    tools = [letter * 20 for letter in "abcdefgh"]
    shown = did_you_mean("hxyzvwux", tools, "tool")
    assert shown.startswith(f"There is {tools[-1]}, ") and shown.endswith("3 more.")


@pytest.mark.parametrize(
    ("names", "text"), [(["a"], "a"), (["a", "b"], "a or b"), ([1, 2, 3], "1, 2 or 3")]
)
def test_either(names: list[object], text: str) -> None:
    assert either(names) == text


@given(st.integers(1, 5000), st.integers(1, 6000))
def test_nearest_divisors_divide_and_enclose(number: int, near: int) -> None:
    divisors = nearest_divisors(number, near)
    assert divisors and all(number % divisor == 0 for divisor in divisors)
    between = range(divisors[0] + 1, divisors[-1])
    assert all(number % divisor for divisor in between)
    assert divisors[0] <= near


def test_nearest_divisors_by_hand() -> None:
    assert nearest_divisors(256, 100) == [64, 128]
    assert nearest_divisors(256, 64) == [64]
    assert nearest_divisors(256, 300) == [256]
