"""Progress that a process reports."""

from __future__ import annotations

import threading
import time

from verl_ray.profiling.progress import (
    advance,
    begin,
    progress,
    reach,
    touch,
    waiting_for_others,
)


def test_counts_are_told_in_words() -> None:
    begin()
    assert str(progress()) == "nothing"
    advance(300, "bytes")
    advance(200, "bytes")
    assert str(progress()) == "500 bytes"
    reach(3, 16, "micro-batches")
    assert str(progress()) == "3 of 16 micro-batches"
    advance(7, "tokens")  # of another kind: counted from the start
    assert str(progress()) == "7 tokens"
    begin()
    assert str(progress()) == "nothing"


def test_time_runs_from_the_last_count_of_any_thread() -> None:
    begin()
    time.sleep(0.05)
    assert progress().idle_s >= 0.05
    other = threading.Thread(target=reach, args=(1, 2, "rows"))
    before = time.monotonic()
    other.start()
    other.join()
    report = progress()
    assert str(report) == "1 of 2 rows" and report.idle_s <= time.monotonic() - before
    reach(5, 9, "tensors")  # the other thread's work is not mixed up with this one's
    assert str(progress()) == "5 of 9 tensors"
    time.sleep(0.05)
    before = time.monotonic()
    touch()
    assert (
        str(progress()) == "5 of 9 tensors"
        and progress().idle_s <= time.monotonic() - before
    )


def test_who_waits_says_so_until_all_have_it() -> None:
    @waiting_for_others()
    def inner() -> bool:
        return progress().waits_for_others

    assert not progress().waits_for_others
    with waiting_for_others():
        assert inner() and progress().waits_for_others
    assert not progress().waits_for_others
