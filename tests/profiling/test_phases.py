"""Where a run is, told after ten seconds without news and then ever less often."""

from __future__ import annotations

import threading

import pytest

from verl_ray.profiling.phases import PHASES, Count, Doing, Phases, blocking


class Time:
    """A clock of the test: `run` ticks twice a second, as waits do."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.reports: list[tuple[float, str]] = []
        self.phases = Phases(self.write, lambda: self.now_s)

    def write(self, report: str) -> None:
        self.reports.append((self.now_s - 100, report))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.5
            self.phases.tick()


@pytest.fixture
def time() -> Time:
    return Time()


def test_a_phase_reports_after_ten_seconds_and_then_less_often(time: Time) -> None:
    scored = 0
    with time.phases.phase(lambda: f"scoring {scored}/256"):
        time.run(9.5)
        assert not time.reports
        scored = 12
        time.run(200)
    assert time.reports == [
        (10, "scoring 12/256 [10 s]"),
        (30, "scoring 12/256 [30 s]"),
        (70, "scoring 12/256 [70 s]"),
        (130, "scoring 12/256 [130 s]"),
        (190, "scoring 12/256 [190 s]"),
    ]
    time.run(100)  # no phase is open
    assert len(time.reports) == 5


def test_phases_within_a_phase_share_its_silence(time: Time) -> None:
    with time.phases.phase("step 3/200"):
        with time.phases.phase("generating"):
            time.run(8)
        with (
            time.phases.phase("updating"),
            time.phases.detail(lambda: "actor 3/16 micro-batches"),
            time.phases.detail(lambda: ""),
        ):
            time.run(8)
        time.run(11)
    assert time.reports == [
        (10, "step 3/200: updating (actor 3/16 micro-batches)"),
        (20, "step 3/200 [20 s]"),
    ]


def test_details_are_requested_shortly_before_a_report(time: Time) -> None:
    assert not time.phases.needs_details()
    with time.phases.phase("saving"):
        time.run(8)
        assert not time.phases.needs_details()
        time.run(0.5)
        assert time.phases.needs_details()
    # A live block makes a text at once and then every 5 s, here after 0.5, 5.5, ... s.
    begun_s = time.now_s
    requested = []
    with time.phases.shown_live(), time.phases.phase("saving"):
        for _ in range(30):
            time.run(0.5)
            if time.phases.needs_details():
                requested.append(time.now_s - begun_s)
    assert requested == [4, 9, 14]


def test_a_text_that_waits_is_not_made_again_meanwhile(time: Time) -> None:
    def text() -> str:
        time.phases.tick()
        return "loading"

    with time.phases.phase(text):
        time.run(10)
    assert time.reports == [(10, "loading [10 s]")]


def test_a_live_block_sees_a_phase_at_once_and_nothing_is_printed(time: Time) -> None:
    numbers = iter(range(100))

    def text() -> str:
        return f"phase {next(numbers)}"

    with time.phases.shown_live(), time.phases.phase(text):
        shown = []
        for seconds in (0.5, 4.5, 0.5, 5):
            time.run(seconds)
            shown.append(time.phases.glance().text)
        # A phase within has no text of its own yet.
        with time.phases.phase("saving"):
            assert time.phases.glance().text == "saving"
    assert shown == ["phase 0", "phase 0", "phase 1", "phase 2"]
    assert not time.reports
    assert time.phases.glance() == Doing("", None, None)


def test_the_outermost_count_is_that_of_the_phases(time: Time) -> None:
    def of_ranks() -> Count:
        return Count(3, 16, "micro-batches")

    with (
        time.phases.shown_live(),
        time.phases.phase("warm start") as warm_start,
        time.phases.phase("step 7/400"),
        time.phases.detail(lambda: "actor 3/16 micro-batches", of_ranks),
    ):
        assert time.phases.glance() == Doing("warm start: step 7/400", None, 0)
        # What ranks say is read in the thread of the driver, when it ticks.
        time.run(0.5)
        text = "warm start: step 7/400 (actor 3/16 micro-batches)"
        assert time.phases.glance() == Doing(text, of_ranks(), 0.5)
        warm_start.reach(6, 400, "steps")
        assert time.phases.glance().count == Count(6, 400, "steps")


def test_a_call_that_blocks_is_reported_by_a_timer() -> None:
    reported = threading.Event()
    texts: list[str] = []

    def write(text: str) -> None:
        texts.append(text)
        reported.set()

    with blocking("starting Ray", write, first_s=0.01):
        assert reported.wait(60)
    assert texts == ["starting Ray [0 s]"]

    with blocking("starting Ray", write, first_s=0.2):
        assert PHASES.glance().text == "starting Ray"
    assert not [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, threading.Timer) and not thread.finished.is_set()
    ]
