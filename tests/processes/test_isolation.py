"""Items that may have ended a process: those that have are found, and no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_ray.processes.isolation import Isolation, Loss


def culprits_of(
    isolation: Isolation[int, int], deadly: set[int], process: int
) -> list[int]:
    """Run all parts, in one process after another; return who is named.

    A process is lost with the first deadly item of its part. Those before it have
    finished by then.
    """
    named: list[int] = []
    while isolation.is_waiting:
        part = isolation.begin(process)
        deaths = [item for item in part if item in deadly]
        if not deaths:
            isolation.finish(process)
            continue
        loss = isolation.note_loss(process, part[part.index(deaths[0]) :])
        assert not loss.free
        if loss.culprit is not None:
            isolation.forget([loss.culprit])
            named.append(loss.culprit)
        process += 1
    return named


@given(
    items=st.sets(st.integers(0, 99), min_size=1, max_size=40),
    most_parts=st.integers(2, 16),
    data=st.data(),
)
def test_all_that_end_their_process_are_named_and_no_others(
    items: set[int], most_parts: int, data: st.DataObject
) -> None:
    deadly = data.draw(st.sets(st.sampled_from(sorted(items))))
    patient = Isolation[int, int](most_parts, free_losses=1)
    # At the first loss they go on, together with others that come later.
    assert patient.note_loss(0, sorted(items)).free == sorted(items)
    assert not patient.is_waiting
    if deadly:
        assert patient.note_loss(1, [*sorted(items), 100]).free == [100]
    assert sorted(culprits_of(patient, deadly, 2)) == sorted(deadly)
    assert patient.processes == []

    strict = Isolation[int, int](most_parts, free_losses=0)
    assert strict.note_loss(0, sorted(items)) == Loss()
    assert sorted(culprits_of(strict, deadly, 1)) == sorted(deadly)
    assert strict.processes == strict.items == []


def lost_together(*items: str) -> Isolation[str, str]:
    """Return the state after two losses with the same items."""
    isolation = Isolation[str, str](4, free_losses=1)
    assert isolation.note_loss("first", items) == Loss(free=list(items))
    isolation.note_loss("second", items)
    return isolation


def test_a_lost_node_holds_nobody_up() -> None:
    isolation = Isolation[int, int](4, free_losses=1)
    for process in range(8):
        items = list(range(32 * process, 32 * process + 32))
        assert isolation.note_loss(process, items) == Loss(free=items)
    assert not isolation.is_waiting
    assert isolation.causes(255) and not isolation.causes(256)
    # Of another process, those wait that were open before.
    assert isolation.note_loss(8, [500, 7, 501]) == Loss(free=[500, 501])
    assert isolation.begin(9) == [7] and not isolation.is_waiting


def test_two_losses_are_enough_for_one_that_is_alone() -> None:
    isolation = Isolation[str, str](4, free_losses=1)
    assert isolation.note_loss("first", ["a"], "exited") == Loss(free=["a"])
    assert isolation.note_loss("second", ["a"], "hung") == Loss(culprit="a")
    assert isolation.causes("a") == ["exited", "hung"]


def test_parts_go_on_one_after_another() -> None:
    isolation = lost_together("a", "b", "c")
    assert isolation.begin("third") == ["a"]
    isolation.finish("third")
    assert isolation.begin("third") == ["b"]
    assert isolation.note_loss("third", ["b"]) == Loss(culprit="b")
    # Two processes may have parts at a time.
    assert isolation.begin("fourth") == ["c"]
    assert isolation.processes == ["fourth"]
    isolation.finish("fourth")
    assert not isolation.is_waiting


def test_losses_in_company_prove_nothing() -> None:
    isolation = lost_together("a", "b")
    assert isolation.note_loss("third", ["a", "b"]) == Loss()
    # Nor does the loss of a process without items, or the first one of an item alone.
    assert isolation.note_loss("fourth", []) == Loss()
    assert isolation.note_loss("fifth", ["c"]) == Loss(free=["c"])


def test_the_losses_of_what_has_finished_do_not_count() -> None:
    isolation = Isolation[str, str](4, free_losses=1)
    isolation.note_loss("first", ["a"])
    isolation.forget(["a"])
    # The same item was open at two losses, and finished between them.
    assert isolation.note_loss("third", ["a"]) == Loss(free=["a"])


def test_a_part_that_is_put_back_comes_first() -> None:
    isolation = lost_together("a", "b")
    assert isolation.begin("third") == ["a"]
    isolation.put_back("third", ["a"])
    assert isolation.processes == []
    assert isolation.begin("fourth") == ["a"]
    assert isolation.note_loss("fourth", ["a"]) == Loss(culprit="a")
    assert isolation.begin("fifth") == ["b"]


def test_what_is_withdrawn_waits_no_longer() -> None:
    isolation = lost_together("a", "b")
    isolation.withdraw(lambda item: item == "a")
    assert isolation.items == ["b"] and isolation.begin("third") == ["b"]
    isolation.withdraw(lambda item: True)
    assert isolation.note_loss("third", []) == Loss() and not isolation.is_waiting
