"""Calls into Ray that do not return; functions that wait stand for them."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from verl_ray.cluster.signals import deferring_signals, stop_on_signals
from verl_ray.cluster.waiting import ClusterLoss, RayCalls
from verl_ray.errors import ClusterError, Interrupted


@pytest.fixture
def calls() -> Iterator[RayCalls]:
    calls = RayCalls(ClusterLoss())
    calls.open(math.inf)
    yield calls
    calls.close(0.0)


def test_calls_return_and_raise_as_if_the_caller_had_made_them(calls: RayCalls) -> None:
    main = threading.get_ident()
    assert calls.make(divmod, 7, 2) == (3, 1)
    assert calls.make(sorted, [1, 2], reverse=True) == [2, 1]
    assert calls.make(threading.get_ident) != main
    with pytest.raises(StopIteration):
        calls.make(next, iter(()))
    with pytest.raises(ZeroDivisionError):
        calls.make(divmod, 1, 0)

    # The same thread makes calls that come one after the other.
    assert len({calls.make(threading.get_ident) for _ in range(20)}) == 1
    assert calls.close(0.0)
    assert calls.make(threading.get_ident) == main


def test_a_call_that_does_not_return_ends_at_the_limit_and_is_named(
    calls: RayCalls,
) -> None:
    calls.open(0.2)
    gate = threading.Event()
    with pytest.raises(ClusterError, match=r"Event\.wait for 0\.2 s \(run\.stall_s\)"):
        calls.make(gate.wait)
    # Others are made meanwhile, and the one that hangs is known at the end.
    assert calls.make(divmod, 7, 2) == (3, 1)
    assert not calls.close(0.0)
    gate.set()
    assert calls.close(10.0)


def test_a_lost_cluster_ends_a_call(calls: RayCalls) -> None:
    gate = threading.Event()

    def wait_for_more() -> None:
        calls.loss.note("raylet has ended")
        gate.wait()

    with pytest.raises(ClusterError, match="Ray's process raylet has ended"):
        calls.make(wait_for_more)
    gate.set()
    # Those that come later are not even begun.
    with pytest.raises(ClusterError, match="Ray's process raylet has ended"):
        calls.make(pytest.fail, "it was made")


def test_a_signal_ends_a_call(calls: RayCalls) -> None:
    stop_on_signals()
    gate = threading.Event()
    with deferring_signals(), pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)
        calls.make(gate.wait)
    gate.set()


def test_a_release_has_its_own_limit(calls: RayCalls) -> None:
    calls.loss.note("raylet has ended")
    gate = threading.Event()
    assert not calls.attempt(0.1, gate.wait)
    gate.set()
    # It is done although the cluster is lost, and whatever it raises.
    assert calls.attempt(10.0, lambda: 1 // 0)
    assert calls.attempt(10.0, lambda: time.sleep(0.1))
