from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from controllers import command_line
from tests.cluster.crew import Echo, Reducer, answers, processes, rows_of
from verl_ray import errors
from verl_ray.cluster.calls import check_progress, wait_all
from verl_ray.cluster.context import ProcessInfo
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.process_control import terminate
from verl_ray.cluster.processes import COLLECTIVE_TIMEOUT_FACTOR, Role
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import put, read
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.errors import (
    CallRefused,
    CheckpointError,
    ClusterError,
    ConfigError,
    DeadlineExceeded,
    HubError,
    Interrupted,
    OverlongRows,
    Problem,
    StaleIncarnation,
    VerlRayError,
    WeightSyncError,
    WorkerDied,
    WorkerError,
)
from verl_ray.ownership import Owner

Crew = Callable[..., WorkerGroup[Any]]
LIMIT_S = 4.0
"""A process that replies does so within an eighth of it, also on a busy machine."""
pytestmark = pytest.mark.cluster


def test_an_exception_names_rank_and_node_and_carries_traceback_and_output(
    crew: Crew,
) -> None:
    group = crew(Echo, 2)
    with pytest.raises(WorkerError) as caught:
        group.broadcast(Echo.fail, 1).result()
    error = caught.value
    assert (error.role, error.rank) == ("echo", 1)
    assert error.message == "fail raised ValueError: the reason"
    assert 'raise ValueError("the reason")' in error.detail
    assert "about to fail, says rank 1" in error.output
    assert os.uname().nodename in error.node
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    # A failed group refuses further calls with the first reason.
    with pytest.raises(
        WorkerError, match=r"the group failed earlier.*ValueError: the reason"
    ):
        group.broadcast(Echo.pid)


REFUSALS = [
    pytest.param(
        ConfigError([Problem("a.key", 1, "a rule", "a fix")]), marks=pytest.mark.slow
    ),
    pytest.param(WeightSyncError("two names differ"), marks=pytest.mark.slow),
    CallRefused("no such field", "n", 404),
]


@pytest.mark.parametrize(
    "refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__
)
def test_what_is_raised_on_purpose_comes_as_it_is(
    crew: Crew, refusal: VerlRayError
) -> None:
    group = crew(Echo, 2)
    with pytest.raises(type(refusal)) as caught:
        group.broadcast(Echo.refuse, 1, refusal).result()
    check_origin(caught.value, refusal, "in refuse")
    with pytest.raises(WorkerError, match="the group failed earlier"):
        group.broadcast(Echo.pid)

    group.restart().wait()
    pieces = group.stream(Echo.one_then_refuse, put(rows_of([1, 1])), refusal)
    with pytest.raises(type(refusal)) as caught:
        list(pieces)
    check_origin(caught.value, refusal, "in one_then_refuse")


def test_a_log_on_a_full_disk_hides_no_failure(crew: Crew) -> None:
    group = crew(Echo, 1)
    refusal = CheckpointError("the disk is full")
    with pytest.raises(CheckpointError, match="the disk is full"):
        group.broadcast(Echo.fail_without_a_disk, refusal).result()

    group.restart().wait()
    with pytest.raises(WorkerError, match="ValueError: the reason"):
        group.broadcast(Echo.fail_without_a_disk, ValueError("the reason")).result()


def check_origin(error: VerlRayError, refusal: VerlRayError, frame: str) -> None:
    """Check that the error arrived unchanged, with its origin and a stack in a log."""
    assert str(error) == str(refusal)
    assert vars(pickle.loads(pickle.dumps(error))).keys() == vars(error).keys()
    origin = error.origin
    assert origin is not None and origin.role == "echo" and origin.output == ""
    match = re.fullmatch(r"its stack is in (\S+)", origin.detail)
    assert match is not None and frame in Path(match[1]).read_text()


def on_purpose() -> list[VerlRayError]:
    """One error of each class that a worker may raise."""
    arguments: dict[type[VerlRayError], tuple[Any, ...]] = {
        ConfigError: ([Problem("a.key", 1, "a rule", "a fix")],),
        OverlongRows: ("a file", "a.key", 1, 2, ""),
        HubError: ("an/id", "a rule", "a fix"),
    }
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, VerlRayError)
    ]
    raised = [
        kind for kind in classes if not issubclass(kind, WorkerError | Interrupted)
    ]
    return [
        kind(*arguments.get(kind, (f"the message of a {kind.__name__}",)))
        for kind in raised
    ]


def test_each_error_is_told_in_a_few_lines(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = crew(Echo, 2)
    refusals = on_purpose()
    calls = [
        (refusal, group.broadcast(Echo.refuse, 1, refusal)) for refusal in refusals
    ]
    failed = group.broadcast(Echo.fail, 1)

    log = group.members()[1].process_info.log_path
    for refusal, call in calls:
        monkeypatch.setattr(
            command_line, "check", lambda *_, call=call, **__: call.result()
        )
        assert command_line.main(["check"]) == type(refusal).exit_code
        *message, origin = capsys.readouterr().err.splitlines()
        assert len(message) < 8
        assert (
            "a fix"
            if isinstance(refusal, ConfigError)
            else f"{type(refusal).__name__}: {refusal}"
        ) in message[-1]
        assert re.fullmatch(
            rf"raised by echo rank 1 on .*{os.uname().nodename}.*; its stack is in {log}",
            origin,
        )
        assert re.search(
            rf"in refuse\n.*\n.*{type(refusal).__name__}: ", Path(log).read_text()
        )

    monkeypatch.setattr(command_line, "check", lambda *_, **__: failed.result())
    assert command_line.main(["check"]) == 1
    message = capsys.readouterr().err
    assert (
        "fail raised ValueError: the reason" in message
        and 'raise ValueError("the reason")' in message
    )
    assert (
        "last output of echo rank 1:" in message
        and "about to fail, says rank 1" in message
    )


def test_an_answer_that_cannot_be_sent_is_the_workers_error(crew: Crew) -> None:
    with pytest.raises(WorkerError, match=r"unpicklable raised.*generator"):
        crew(Echo, 1).rank_zero(Echo.unpicklable).result()


def test_a_killed_process_is_reported_with_its_final_output(crew: Crew) -> None:
    group = crew(Echo, 2)
    pids = group.broadcast(Echo.pid).result()
    calls = [group.broadcast(Echo.sleep_for_long, 0), group.broadcast(Echo.die, 1)]
    with pytest.raises(WorkerDied) as caught:
        wait_all(calls)
    assert (caught.value.role, caught.value.rank) == ("echo", 1)
    assert "final output of rank 1" in caught.value.output
    assert str(pids[1]) in caught.value.detail


def test_an_idle_process_that_was_killed_is_noticed_by_the_next_call(
    crew: Crew,
) -> None:
    group = crew(Echo, 1)
    os.kill(group.rank_zero(Echo.pid).result(), signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        group.rank_zero(Echo.pid).result()
    assert "echo 0 is here" in caught.value.output


def test_the_death_of_a_rank_is_reported_and_not_what_it_did_to_its_peers(
    crew: Crew,
) -> None:
    group = crew(Reducer, 2, process_group=True)
    assert group.broadcast(Reducer.total, 2.0).result() == [6.0, 6.0]
    assert group.broadcast(Reducer.interface).result() == ["lo", "lo"]
    assert (
        group.broadcast(Reducer.timeouts_s).result()
        == [[COLLECTIVE_TIMEOUT_FACTOR * 60.0] * 3] * 2
    )  # whoever made them
    with pytest.raises(WorkerDied) as caught:
        group.broadcast(Reducer.total_but_one_dies).result()
    assert caught.value.rank == 1


@pytest.mark.slow
def test_one_that_stands_still_is_named_and_shown(crew: Crew) -> None:
    group = crew(Echo, 2, stall_s=LIMIT_S)
    with pytest.raises(DeadlineExceeded) as caught:
        group.broadcast(Echo.sleep_for_long, 1).result()
    assert caught.value.rank == 1
    assert "time.sleep(60)" in caught.value.detail
    assert "rank 0" not in caught.value.detail


def test_what_makes_progress_is_not_late(crew: Crew) -> None:
    group = crew(Echo, 1, stall_s=3)
    queued = [
        group.rank_zero(Echo.plod, 12) for _ in range(3)
    ]  # 1.2 s each, so the last one is done after 3.6 s
    assert wait_all(queued) == [12, 12, 12]
    pieces = group.stream(Echo.one_by_one, put(rows_of([1] * 9)), 0.4)
    assert len(list(pieces)) == 9  # 3.6 s


def test_the_stuck_one_of_many_queued_calls_is_named(crew: Crew) -> None:
    group = crew(Echo, 1, stall_s=LIMIT_S)
    done = [group.rank_zero(Echo.plod, 1) for _ in range(16)]
    queued = [
        group.rank_zero(Echo.stick, 3),
        *(group.rank_zero(Echo.pid) for _ in range(16)),
    ]
    message = r"pid makes no progress: stick of echo comes first, and the process did 3 of 16 micro-batches, then nothing"
    with pytest.raises(DeadlineExceeded, match=message) as caught:
        while True:
            check_progress(queued[1:])  # as while something else is waited for
            time.sleep(0.1)
    assert (
        f"run.stall_s = {LIMIT_S:g})" in caught.value.message
        and "in stick" in caught.value.detail
    )
    with pytest.raises(DeadlineExceeded, match="the group failed earlier"):
        group.rank_zero(Echo.pid)
    assert wait_all(done) == [1] * 16


def test_calls_beside_a_wait_may_not_stand_still(crew: Crew) -> None:
    """A trainer waits for the critic, which gets on, while the actor is stuck."""
    critic, actor = crew(Echo, 1), crew(Echo, 1, stall_s=1.0)
    stuck = actor.rank_zero(Echo.sleep_for_long, 0)
    with pytest.raises(
        DeadlineExceeded, match="sleep_for_long makes no progress"
    ) as caught:
        wait_all([critic.rank_zero(Echo.plod, 300)], partial(check_progress, [stuck]))
    assert actor.owns(caught.value)


def test_of_roles_that_share_a_process_the_first_is_named(
    cluster: Session, tmp_path: Path
) -> None:
    roles = [Role(name, "trainer", Echo) for name in ("actor", "critic")]
    with start_groups(
        [processes("trainer", 1)], roles, stall_s=60, log_dir=tmp_path
    ) as groups:
        actor, critic = (groups[role] for role in roles)
        actor._processes.stall_s = 1.0  # theirs together
        calls = [actor.rank_zero(Echo.sleep_for_long, 0), critic.rank_zero(Echo.nap)]
        with pytest.raises(
            DeadlineExceeded, match=r"actor rank 0 .*sleep_for_long makes no progress"
        ):
            wait_all(calls)


def test_rows_that_do_not_arrive_are_named(crew: Crew) -> None:
    call = crew(Echo, 1).rank_zero(Echo.nap)
    coming = Sharded.stored(call._rank_calls[0].payload, Receipt.of(rows_of([1])))
    message = r"1 rows of Rows lie in 1 stored objects, of which 0 have arrived and none in the last 0.2 s \(run.stall_s\)"
    with pytest.raises(ClusterError, match=message):
        read(coming, 0.2)


def test_who_waits_in_a_collective_is_not_to_blame(
    crew: Crew, capsys: pytest.CaptureFixture[str]
) -> None:
    group = crew(Reducer, 2, process_group=True, stall_s=LIMIT_S)
    group.broadcast(Reducer.total, 1.0).result()
    with pytest.raises(
        DeadlineExceeded, match="total_but_one_is_stuck makes no progress"
    ) as caught:
        group.broadcast(Reducer.total_but_one_is_stuck).result()
    assert caught.value.rank == 1 and "nor do ranks" not in caught.value.message
    shown = caught.value.detail
    assert (
        shown.index("reducer rank 1")
        < shown.index("time.sleep(60)")
        < shown.index("reducer rank 0")
    )
    assert "all_reduce" in shown[shown.index("reducer rank 0") :]

    table = capsys.readouterr().err
    assert table.count("waits for") == 1
    stuck, waiting = (
        next(
            line for line in table.splitlines() if re.match(rf"reducer +{rank} ", line)
        )
        for rank in (1, 0)
    )
    assert "total_but_one_is_stuck" in stuck and "gloo" not in stuck
    assert "gloo:all_reduce 2: not entered by rank 1" in waiting
    assert re.search(r"crew.py:\d+ total_but_one_is_stuck$", waiting) is not None
    (note,) = caught.value.__notes__
    stacks = Path(note.rpartition(" ")[2]).read_text()
    assert table.strip() in stacks and "time.sleep(60)" in stacks


@pytest.mark.parametrize(
    ("method", "shown"),
    [
        (Echo.hold_the_lock, "in hold_the_lock"),
        pytest.param(
            Echo.stop_itself,
            "the process is stopped (SIGSTOP)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_whose_control_group_is_stuck_too_is_reported(
    crew: Crew, method: Callable[[Echo], None], shown: str
) -> None:
    group = crew(Echo, 1, stall_s=LIMIT_S)
    group.rank_zero(Echo.plod, 5).result()
    with pytest.raises(
        DeadlineExceeded,
        match=r"the process has not replied for .* s \(run.stall_s = 4\)",
    ) as caught:
        group.rank_zero(method).result()
    assert "the control group does not reply either" in caught.value.detail
    assert shown in caught.value.detail


def test_the_control_group_replies_while_a_call_runs(crew: Crew) -> None:
    group = crew(Echo, 1)
    group.rank_zero(Echo.nap)
    running = None
    while running is None:
        running = answers(group, "status")[0].running
    assert running[:2] == ("echo", "nap")
    assert 0 < running[2] < 4
    stacks = answers(group, "stacks")[0]
    assert (
        "time.sleep(3)" in stacks[: stacks.index("thread", 10)]
    )  # the busy thread comes first


def test_streams_report_exceptions_and_deaths(crew: Crew) -> None:
    rows = put(rows_of([2, 2]))
    for method, kind, text in (
        (Echo.one_then_fail, WorkerError, "no more rows"),
        (Echo.one_then_die, WorkerDied, "the process died during one_then_die"),
    ):
        group = crew(Echo, 1)
        pieces = group.stream(method, rows)
        assert read(next(pieces), 5).log_probs.tolist() == [0, 0.5]
        group.rank_zero(Echo.open_the_gate)
        with pytest.raises(kind, match=text):
            next(pieces)
    late = crew(Echo, 1, stall_s=1.0).stream(Echo.one_by_one, rows, 30.0)
    with pytest.raises(DeadlineExceeded, match="one_by_one makes no progress"):
        next(late)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_ends_with_what_it_has_started_though_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        child.send_signal(signal.SIGSTOP)
        here = psutil.Process(parent.pid)
        owner = Owner.of(parent.pid)
        # Another process, which had this number before.
        earlier = replace(owner, started=owner.started - 1)
        process_info = ProcessInfo(earlier, "node", "127.0.0.1", "host", "log")
        # Somebody sets the clock, and so the time at which the machine has started.
        booted_s = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + 3600)
        terminate(process_info)
        assert here.is_running() and child.is_running()
        terminate(replace(process_info, owner=owner))
        assert parent.wait(100) == -signal.SIGKILL
        gone, alive = psutil.wait_procs([child], timeout=100)
        assert gone == [child] and alive == []


def test_a_restarted_group_works_and_refuses_what_belongs_to_its_past(
    crew: Crew,
) -> None:
    group = crew(Echo, 2)
    rows = put(rows_of([1, 2, 3]))
    before = group.scatter(Echo.halve, rows)
    with pytest.raises(WorkerDied):
        group.broadcast(Echo.die, 0).result()
    group.restart().wait()
    assert group.incarnation == 2
    with pytest.raises(
        StaleIncarnation,
        match="the result of a call on incarnation 1 was requested, but the group is at"
        " incarnation 2",
    ):
        before.result()
    assert read(group.scatter(Echo.halve, rows).result(), 5).num_tokens == 6
    assert group.rank_zero(Echo.context_of).result().incarnation == 2
