"""The parts of a weight sync's time, by hand."""

from __future__ import annotations

import pytest

from controllers.publishing.sync_clock import SyncClock


def test_each_moment_counts_towards_the_part_that_it_was_spent_on() -> None:
    moments = iter([10.0, 10.5, 13.5, 14.0, 14.25, 14.25, 15.25])
    clock = SyncClock(lambda: next(moments))
    clock.count_as("offload")
    clock.count_as("stream")
    clock.count_as("prove")
    clock.count_as("offload")
    clock.count_as("wake")
    clock.count_as("prove")

    # The fingerprints are made within the 3 s of the stream. Bytes are sent in these and
    # in the 1.5 s of the proof.
    assert clock.metrics(fingerprints_s=2.0, nbytes=9_000) == {
        "timing_s/weight_sync/offload": 0.75,
        "timing_s/weight_sync/stream": 3.0,
        "timing_s/weight_sync/prove": 1.5,
        "timing_s/weight_sync/wake": 0.0,
        "timing_s/weight_sync/fingerprints": 2.0,
        "weight_sync/bytes_per_s": pytest.approx(2_000),
    }
