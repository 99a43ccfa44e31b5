"""Assignments that were worked out by hand."""

from __future__ import annotations

from verl_ray.rollout.balancer import Balancer, WorkItem


def assigned(balancer: Balancer[str]) -> dict[str, list[int]]:
    return {
        replica: [item.session for item in items]
        for replica, items in balancer.assign().items()
    }


def test_each_item_goes_to_the_least_loaded_server_that_has_room() -> None:
    balancer = Balancer(["a", "b"], limit=8)
    balancer.add(
        [
            WorkItem(0, 4),
            WorkItem(1, 2),
            WorkItem(2, 2),
            WorkItem(3, 4),
            WorkItem(4, 4),
            WorkItem(5, 1),
        ]
    )
    assert assigned(balancer) == {
        "a": [0, 3],
        "b": [1, 2, 4],
    }  # loads 4, 2, 4, 8, 8: the sixth waits
    assert balancer.waiting == 1
    balancer.finish("b", 1)
    assert assigned(balancer) == {"b": [5]}


def test_an_item_that_is_larger_than_the_room_has_a_server_to_itself() -> None:
    balancer = Balancer(["a"], limit=4)
    balancer.add([WorkItem(0, 9), WorkItem(1, 1)])
    assert assigned(balancer) == {"a": [0]}
    balancer.finish("a", 8)
    assert assigned(balancer) == {
        "a": [1]
    }  # one of nine is left, so there is room for three


def test_a_session_stays_where_its_prefix_is_cached() -> None:
    balancer = Balancer(["a", "b"], limit=100)
    balancer.add([WorkItem(0, 1), WorkItem(1, 5)])
    assert assigned(balancer) == {"a": [0], "b": [1]}
    balancer.add([WorkItem(1, 1), WorkItem(2, 1)])
    assert assigned(balancer) == {"b": [1], "a": [2]}
    balancer.forget_sessions()
    balancer.add([WorkItem(1, 1)])
    assert assigned(balancer) == {"a": [1]}


def test_a_server_that_left_gets_nothing_and_what_it_had_is_first() -> None:
    balancer = Balancer(["a", "b"], limit=2)
    balancer.add([WorkItem(0, 2), WorkItem(1, 2), WorkItem(2, 2), WorkItem(3, 2)])
    assert assigned(balancer) == {"a": [0], "b": [1]}
    balancer.remove_replica("a")
    balancer.add([WorkItem(0, 2)], first=True)
    balancer.finish("a", 2)  # a reply that was on its way
    assert assigned(balancer) == {}
    balancer.finish("b", 2)
    assert assigned(balancer) == {"b": [0]}
    balancer.remove_replica("b")
    balancer.add([WorkItem(0, 1)], first=True)
    assert assigned(balancer) == {}
    balancer.add_replica("a")
    assert assigned(balancer) == {"a": [0]}


def test_a_busy_server_takes_none_and_its_sessions_wait() -> None:
    balancer = Balancer("ab", 10)
    balancer.add([WorkItem(0, 1), WorkItem(1, 1)])
    first = balancer.assign()
    home = next(replica for replica, items in first.items() if WorkItem(0, 1) in items)
    balancer.add([WorkItem(2, 1), WorkItem(0, 1), WorkItem(3, 1)])
    other = ({"a", "b"} - {home}).pop()
    assert balancer.assign({home}) == {
        other: [WorkItem(2, 1)]
    }  # 0 is at home there, and none passes it
    assert balancer.assign({"a", "b"}) == {} and balancer.waiting == 2
    assert sum(map(len, balancer.assign().values())) == 2


def test_each_replica_has_a_limit_of_its_own() -> None:
    """One that is full does not keep another from getting more."""
    balancer = Balancer(["a", "b"], limit=2)
    balancer.set_limit("b", 4)
    balancer.add([WorkItem(session, 1) for session in range(9)])
    # Idle replicas first; then b is farther below its limit until both lack one.
    assert assigned(balancer) == {"b": [0, 2, 3, 5], "a": [1, 4]}
    assert (balancer.load("a"), balancer.load("b"), balancer.waiting) == (2, 4, 3)

    # A lower limit takes nothing back, and nothing is added until there is room.
    balancer.set_limit("b", 1)
    balancer.finish("b", 3)
    assert assigned(balancer) == {}
    balancer.finish("b", 1)
    assert assigned(balancer) == {"b": [6]}

    # Its next process begins with the limit that all have.
    balancer.remove_replica("b")
    balancer.add_replica("b")
    assert assigned(balancer) == {"b": [7, 8]}
    assert balancer.load("c") == 0


def test_a_replica_without_work_takes_what_others_have_no_room_for() -> None:
    balancer = Balancer(["a", "b"], limit=8)
    balancer.set_limit("b", 100)
    balancer.add([WorkItem(0, 1), WorkItem(1, 90)])
    assert assigned(balancer) == {"b": [0], "a": [1]}
    balancer.finish("a", 90)
    balancer.set_limit("b", 11)
    # Below their limits by 8 and 10.
    balancer.add([WorkItem(2, 16)])
    assert assigned(balancer) == {"a": [2]}


def test_sessions_that_ended_stay_nowhere() -> None:
    balancer = Balancer(["a", "b"], limit=100)
    balancer.add([WorkItem(0, 3), WorkItem(1, 1)])
    assert assigned(balancer) == {"a": [0], "b": [1]}
    balancer.forget([0])
    balancer.add([WorkItem(0, 1), WorkItem(1, 1)])
    assert assigned(balancer) == {"b": [0, 1]}
