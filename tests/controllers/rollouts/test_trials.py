"""Trials of prompts that may have ended a replica: the guilty are found, and no other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controllers.rollouts.generation import Trials, Verdict


def tried(trials: Trials[int, int], guilty: set[int], replica: int) -> list[int]:
    """Make all trials, on one replica after another; return who is given up.

    A replica is lost with the first guilty prompt of its part. Those before it have
    finished by then.
    """
    given_up: list[int] = []
    while trials.waiting:
        part = trials.begin(replica)
        culprits = [prompt for prompt in part if prompt in guilty]
        if not culprits:
            trials.acquit()
            continue
        verdict = trials.note_loss(replica, part[part.index(culprits[0]) :])
        assert not verdict.free
        if verdict.guilty is not None:
            given_up.append(verdict.guilty)
        replica += 1
    return given_up


@given(suspects=st.sets(st.integers(0, 99), min_size=1, max_size=40), data=st.data())
def test_all_of_the_guilty_are_found_and_no_innocent(
    suspects: set[int], data: st.DataObject
) -> None:
    guilty = data.draw(st.sets(st.sampled_from(sorted(suspects))))
    trials: Trials[int, int] = Trials()
    # At the first loss they go on, together with others that come later.
    assert trials.note_loss(0, sorted(suspects)).free == sorted(suspects)
    assert not trials.waiting
    if guilty:
        assert trials.note_loss(1, [*sorted(suspects), 100]).free == [100]
    assert sorted(tried(trials, guilty, 2)) == sorted(guilty)
    assert trials.replica is None


def lost_together(*prompts: str) -> Trials[str, str]:
    """Trials after two losses with the same prompts."""
    trials: Trials[str, str] = Trials()
    assert trials.note_loss("first", prompts) == Verdict(free=list(prompts))
    trials.note_loss("second", prompts)
    return trials


def test_a_lost_node_holds_nobody_up() -> None:
    trials: Trials[int, int] = Trials()
    for replica in range(8):
        prompts = list(range(32 * replica, 32 * replica + 32))
        assert trials.note_loss(replica, prompts) == Verdict(free=prompts)
    assert not trials.waiting and trials.suspects([255]) and not trials.suspects([256])
    # Of another replica, those are tried that were open before.
    assert trials.note_loss(8, [500, 7, 501]) == Verdict(free=[500, 501])
    assert trials.begin(9) == [7] and not trials.waiting


def test_two_losses_are_enough_for_one_that_is_alone() -> None:
    trials: Trials[str, str] = Trials()
    assert trials.note_loss("first", ["a"]) == Verdict(free=["a"])
    assert trials.note_loss("second", ["a"]) == Verdict(guilty="a")


def test_parts_are_tried_one_after_another() -> None:
    trials = lost_together("a", "b", "c")
    assert trials.begin("third") == ["a"]
    trials.acquit()
    assert trials.begin("third") == ["b"]
    assert trials.note_loss("third", ["b"]) == Verdict(guilty="b")
    assert trials.begin("fourth") == ["c"]
    trials.acquit()
    assert not trials.waiting


def test_losses_in_company_prove_nothing() -> None:
    trials = lost_together("a", "b")
    assert trials.note_loss("third", ["a", "b"]) == Verdict()
    # Nor does the loss of a replica without rows, or the first one of a prompt alone.
    assert trials.note_loss("fourth", []) == Verdict()
    assert trials.note_loss("fifth", ["c"]) == Verdict(free=["c"])


def test_who_has_finished_is_innocent_again() -> None:
    trials: Trials[str, str] = Trials()
    trials.note_loss("first", ["a"])
    trials.forget(["a"])
    # The same prompt was open at two losses, and finished between them.
    assert trials.note_loss("third", ["a"]) == Verdict(free=["a"])


def test_a_trial_that_is_put_off_comes_first() -> None:
    trials = lost_together("a", "b")
    assert trials.begin("third") == ["a"]
    trials.put_off(["a"])
    assert trials.replica is None
    trials.put_off([])
    assert trials.begin("fourth") == ["a"]
    assert trials.note_loss("fourth", ["a"]) == Verdict(guilty="a")
    assert trials.begin("fifth") == ["b"]
