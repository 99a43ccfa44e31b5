"""Who gets what, by hand."""

from __future__ import annotations

from verl_ray.rollout.balancer import Balancer, Item


def given(balancer: Balancer[str]) -> dict[str, list[int]]:
    return {server: [item.session for item in items] for server, items in balancer.assign().items()}


def test_each_item_goes_to_the_least_loaded_server_that_has_room() -> None:
    balancer = Balancer(["a", "b"], room=8)
    balancer.add([Item(0, 4), Item(1, 2), Item(2, 2), Item(3, 4), Item(4, 4), Item(5, 1)])
    assert given(balancer) == {"a": [0, 3], "b": [1, 2, 4]}  # loads 4, 2, 4, 8, 8: the sixth waits
    assert balancer.waiting == 1
    balancer.done("b", 1)
    assert given(balancer) == {"b": [5]}


def test_an_item_that_is_larger_than_the_room_has_a_server_to_itself() -> None:
    balancer = Balancer(["a"], room=4)
    balancer.add([Item(0, 9), Item(1, 1)])
    assert given(balancer) == {"a": [0]}
    balancer.done("a", 8)
    assert given(balancer) == {"a": [1]}  # one of nine is left, so there is room for three


def test_a_session_stays_where_its_prefix_is_cached() -> None:
    balancer = Balancer(["a", "b"], room=100)
    balancer.add([Item(0, 1), Item(1, 5)])
    assert given(balancer) == {"a": [0], "b": [1]}
    balancer.add([Item(1, 1), Item(2, 1)])
    assert given(balancer) == {"b": [1], "a": [2]}
    balancer.forget()
    balancer.add([Item(1, 1)])
    assert given(balancer) == {"a": [1]}


def test_a_server_that_left_gets_nothing_and_what_it_had_is_first() -> None:
    balancer = Balancer(["a", "b"], room=2)
    balancer.add([Item(0, 2), Item(1, 2), Item(2, 2), Item(3, 2)])
    assert given(balancer) == {"a": [0], "b": [1]}
    balancer.leave("a")
    balancer.add([Item(0, 2)], first=True)
    balancer.done("a", 2)  # an answer that was on its way
    assert given(balancer) == {}
    balancer.done("b", 2)
    assert given(balancer) == {"b": [0]}
    balancer.leave("b")
    balancer.add([Item(0, 1)], first=True)
    assert given(balancer) == {}
    balancer.join("a")
    assert given(balancer) == {"a": [0]}


def test_a_busy_server_takes_none_and_its_sessions_wait() -> None:
    balancer = Balancer("ab", 10)
    balancer.add([Item(0, 1), Item(1, 1)])
    first = balancer.assign()
    home = next(server for server, items in first.items() if Item(0, 1) in items)
    balancer.add([Item(2, 1), Item(0, 1), Item(3, 1)])
    other = ({"a", "b"} - {home}).pop()
    assert balancer.assign({home}) == {other: [Item(2, 1)]}  # 0 is at home there, and none passes it
    assert balancer.assign({"a", "b"}) == {} and balancer.waiting == 2
    assert sum(map(len, balancer.assign().values())) == 2
