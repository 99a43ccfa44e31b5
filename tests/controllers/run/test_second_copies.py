"""Second copies of snapshots between two nodes of a real cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kills import ROOT

PROGRAM = """
import signal, sys, time
import psutil, ray
from controllers.run.snapshots import SecondCopies
from tests.lost_nodes import two_nodes
from verl_ray.checkpoint.snapshot_files import PIECE_BYTES, SnapshotFiles
from verl_ray.checkpoint.snapshot_files import SnapshotNames
from verl_ray.cluster.process_control import task_on
from verl_ray.cluster.session import Session
from verl_ray.cluster.snapshot_transfer import begin_removal

FIRST, SECOND = ("actor", 0), ("actor", 1)
SIZE = PIECE_BYTES + 100  # two pieces

def take(names, rank, step, value):
    slot = SnapshotFiles(names.place(*rank), names).oldest()
    slot.reserve(SIZE)[:] = value
    slot.complete(step, b"about")

def values(names, rank):
    files = SnapshotFiles(names.place(*rank), names)
    return {
        step: (sorted(set(files.of(step).read()[:SIZE].tolist())), files.of(step).description())
        for step in files.steps()
    }

def finish(copies):
    until = time.monotonic() + 100
    while copies.are_on_their_way:
        assert time.monotonic() < until
        time.sleep(0.05)

def main():
    with two_nodes() as cluster, Session.open(cluster.address) as session:
        a, b = sorted(node.node_id for node in session.resources())
        names = SnapshotNames.of("a run")
        homes = {FIRST: a, SECOND: b}
        on = lambda node, *task: ray.get(task_on(node, *task))
        for step in (3, 4):
            on(a, take, names, FIRST, step, step)
            on(b, take, names, SECOND, step, 10 * step)

        copies = SecondCopies(True, 20.0)
        copies.begin(names, 3, homes)
        finish(copies)
        assert copies.find(names) == {FIRST: {3: b}, SECOND: {3: a}}
        assert on(b, values, names, FIRST) == {3: ([3], b"about")}
        assert on(a, values, names, SECOND) == {3: ([30], b"about")}

        # A step that no rank has costs the limit, a warning, and no copy of before.
        limits_s = copies._limits_s
        copies._limits_s = (2.0, limits_s[1])
        copies.begin(names, 9, homes)
        finish(copies)
        copies._limits_s = limits_s
        # Neither does a source that is stopped. Where its process has not started within
        # the short limit, the copy begins once more.
        hasty = SecondCopies(True, 2.0, start_s=2.0)
        sending = {}
        try:
            while not sending:
                hasty.begin(names, 10, homes)
                while hasty.are_on_their_way:
                    # Tests beside this one have clusters of their own.
                    family = psutil.Process().children(recursive=True)
                    for process in psutil.process_iter(["cmdline"]):
                        is_sender = (process.info["cmdline"] or [""])[0].startswith("ray::_send")
                        if is_sender and process in family and process.pid not in sending:
                            sending[process.pid] = process
                            process.suspend()
                    time.sleep(0.01)
        finally:
            for process in sending.values():
                process.kill()
        assert copies.find(names) == {FIRST: {3: b}, SECOND: {3: a}}

        # The first rank starts again without its memory, and the second where its copy is.
        ray.get(begin_removal(names, [FIRST], a))
        assert copies.send_back(names, 3, {FIRST: b, SECOND: a}, {FIRST: a, SECOND: a})
        assert on(a, values, names, FIRST) == {3: ([3], b"about")}
        assert not copies.send_back(names, 5, {FIRST: b}, homes)

        # What followed the step that the run went back to counts nowhere.
        copies.begin(names, 3, homes)
        finish(copies)
        assert copies.find(names.back_to(2)) == {FIRST: {}, SECOND: {}}
        assert copies.find(names.back_to(3)) == {FIRST: {3: b}, SECOND: {3: a}}

        copies.close(names)
        assert copies.find(names) == {}
        assert on(b, values, names, FIRST) == {} and on(a, values, names, SECOND) == {}
        # Those of the ranks are theirs.
        assert on(a, values, names, FIRST) == {3: ([3], b"about")}
        for rank, node in homes.items():
            ray.get(begin_removal(names, [rank], node))

        # One node has nowhere to send to.
        copies.begin(names, 3, {FIRST: a, SECOND: a})
        assert not copies.are_on_their_way

if __name__ == "__main__":
    main()
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_copies_travel_between_nodes() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "no second copy" in line]
    absent, *stopped, alone = said
    assert "did not send it: there is none of step 9 (run.recovery." in absent
    expected = "no second copy: no piece of it has come for 4 s (run.recovery."
    assert any(expected in line for line in stopped), ended.stderr
    assert "the run has one node (run.recovery.snapshot_copies=1" in alone
