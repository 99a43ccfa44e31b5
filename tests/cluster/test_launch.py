from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.utils import publish_error_to_driver

from tests.cluster.crew import Builds, Echo, NeverReady, Unbuildable, processes, rows_of
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.processes import Role, check_topologies
from verl_ray.cluster.session import Session, ray_messages
from verl_ray.cluster.waiting import put
from verl_ray.columns.packing import Topology
from verl_ray.errors import ClusterError, DeadlineExceeded, ModelError, WorkerError
from verl_ray.profiling.trace import SPANS, Span


def free_cpus(cluster: Session) -> float:
    return sum(node.available.get("CPU", 0.0) for node in cluster.resources())


def hosts() -> list[psutil.Process]:
    """Worker processes of this test's own cluster."""
    running = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::WorkerHost"):
                running.append(process)
    return running


def wait_until_released(cluster: Session) -> None:
    until = time.monotonic() + 60
    while (free_cpus(cluster) < 4 or hosts()) and time.monotonic() < until:
        time.sleep(0.1)
    assert free_cpus(cluster) == 4
    assert hosts() == []


@pytest.fixture
def ray_log(cluster: Session, tmp_path: Path) -> Iterator[Path]:
    """The file in which Ray's messages to this process are kept meanwhile."""
    ray_messages.keep_in(tmp_path)
    yield tmp_path / "ray.log"
    ray_messages.release()


def lines_with_last(ray_log: Path, last: str) -> list[str]:
    """The messages up to one that is sent now."""
    publish_error_to_driver(
        "remark", last, ray._private.worker.global_worker.gcs_client
    )
    until = time.monotonic() + 60
    lines: list[str] = []
    while not any(last in line for line in lines) and time.monotonic() < until:
        time.sleep(0.1)
        lines = ray_log.read_text().splitlines() if ray_log.exists() else []
    return lines


def test_topologies_must_cover_every_data_parallel_rank_once() -> None:
    check_topologies(
        "actor", [Topology(0, 2, False), Topology(0, 2, True), Topology(1, 2, True)]
    )
    with pytest.raises(
        ClusterError,
        match=r"data-parallel ranks 0\.\.1 needs exactly one rank that returns",
    ):
        check_topologies(
            "actor", [Topology(0, 2, True), Topology(0, 2, True), Topology(1, 2, True)]
        )


@pytest.mark.cluster
def test_colocated_roles_share_a_process_and_close_gracefully(
    cluster: Session,
    tmp_path: Path,
    ray_log: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill = ray.kill

    def kill_late(actor: ray.actor.ActorHandle[object]) -> None:
        # Ray has the time to notice what has ended before.
        time.sleep(0.3)
        kill(actor)

    monkeypatch.setattr(ray, "kill", kill_late)
    actor = Role("actor", "trainer", Echo, (tmp_path,))
    critic = Role("critic", "trainer", Echo, (tmp_path,))
    rollout = Role("rollout", "rollout", Echo, (tmp_path,))
    plan = [
        processes("trainer", 2, bundle_group="main"),
        processes("rollout", 1, bundle_group="main"),
    ]
    # Workers note spans where their driver does.
    with (
        SPANS.noted(True),
        start_groups(
            plan, [actor, critic, rollout], stall_s=60, log_dir=tmp_path / "logs"
        ) as groups,
    ):
        pids = [
            groups[role].broadcast(Echo.pid).result()
            for role in (actor, critic, rollout)
        ]
        assert pids[0] == pids[1]
        assert len({*pids[0], *pids[2]}) == 3
        context = groups[critic].broadcast(Echo.context_of).result()[1]
        assert (context.role, context.rank, context.num_ranks, context.device) == (
            "critic",
            1,
            2,
            "cpu",
        )
        assert context.log_path == tmp_path / "logs" / "trainer-1.log"
        assert "echo 1 is here" in context.log_path.read_text()
        groups[actor].broadcast(Echo.import_torch).result()
        assert groups[actor].broadcast(Echo.threads).result() == [(1, "1"), (1, "1")]
        assert groups[rollout].scatter(Echo.count, put(rows_of([3]))).result() == [3]
        usage = groups.request_usage()()  # of each process, whatever its roles
        peaks = [process for process, _ in usage]
        sets = [use.processes for _, use in usage]
        assert sets == ["trainer", "trainer", "rollout"]
        called = [("actor", "import_torch"), ("actor", "pid"), ("actor", "threads"), ("critic", "context_of"),
                  ("critic", "pid")]  # fmt: skip
        assert [sorted(process.by_call) for process in peaks] == [
            called,
            called,
            [("rollout", "count"), ("rollout", "pid")],
        ]
        for process in peaks[:2]:
            assert (
                process.by_call["actor", "import_torch"]
                - process.by_call["actor", "pid"]
                > 30 << 20
            )
        assert [process.by_call for process, _ in groups.request_usage()()] == [
            {},
            {},
            {},
        ]
        spans: dict[str, list[Span]] = {}
        # None is asked again before it has replied. Ends when each has, once.
        while len(spans) < 3:
            for process in groups.take_spans(within_s=0.01, waits_for_late=True):
                spans.setdefault(process.name, process.spans)
        assert sorted(spans) == ["rollout-0", "trainer-0", "trainer-1"]
        # A span is noted when it ends.
        _, read, count = spans["rollout-0"]
        assert (read.name, count.name) == ("read Rows", "rollout.count")
        assert count.details == {"rows": 1, "tokens": 3}
        assert count.begin_ns <= read.begin_ns <= read.end_ns <= count.end_ns

        # One that hangs is waited for once, and then not again before it has replied.
        hanging = psutil.Process(pids[2][0])
        hanging.suspend()
        groups.take_spans(within_s=0.01)
        groups.take_spans(within_s=0.01)
        names = {process.name for process in groups.take_spans(within_s=3600)}
        assert "rollout-0" not in names
        hanging.resume()
        while "rollout-0" not in names:
            late = groups.take_spans(within_s=60, waits_for_late=True)
            names |= {process.name for process in late}
    closed = sorted(path.name for path in tmp_path.glob("closed-*"))
    assert closed == [
        "closed-actor-0",
        "closed-actor-1",
        "closed-critic-0",
        "closed-critic-1",
        "closed-rollout-0",
    ]
    wait_until_released(cluster)
    # Of a worker that was killed, Ray would say that it died unexpectedly.
    (last,) = lines_with_last(ray_log, "all of them are gone")
    assert last.endswith(" (raylet) all of them are gone")


@pytest.mark.cluster
def test_what_needs_the_room_of_others_is_built_first(
    cluster: Session, tmp_path: Path
) -> None:
    roles = [
        Role(name, name, partial(Builds, folder=tmp_path, slow=name == "rollout"))
        for name in ("actor", "rollout")
    ]
    plan = [processes("actor", 1), replace(processes("rollout", 1), built_first=True)]
    with start_groups(plan, roles, stall_s=60, log_dir=tmp_path):
        pass
    wait_until_released(cluster)


@pytest.mark.cluster
def test_a_failed_start_names_the_part_and_leaves_nothing(
    cluster: Session, tmp_path: Path
) -> None:
    good, bad = (
        Role("actor", "trainer", Echo),
        Role("critic", "other", Unbuildable, (RuntimeError("no model here"),)),
    )
    plan = [processes("trainer", 1), processes("other", 2)]
    with pytest.raises(
        WorkerError, match=r"critic rank 1 on .*no model here"
    ) as caught:
        start_groups(plan, [good, bad], stall_s=60, log_dir=tmp_path)
    assert "raise error" in caught.value.detail
    wait_until_released(cluster)


@pytest.mark.cluster
def test_what_a_start_refuses_comes_as_it_is(cluster: Session, tmp_path: Path) -> None:
    bad = Role("critic", "other", Unbuildable, (ModelError("no model here"),))
    with pytest.raises(ModelError, match=r"^no model here$") as caught:
        start_groups([processes("other", 2)], [bad], stall_s=60, log_dir=tmp_path)
    origin = caught.value.origin
    assert origin is not None and (origin.role, origin.rank) == ("critic", 1)
    assert (
        origin.detail == f"its stack is in {tmp_path / 'other-1.log'}"
        and origin.output == ""
    )
    assert "raise error" in (tmp_path / "other-1.log").read_text()
    wait_until_released(cluster)


@pytest.mark.cluster
def test_a_late_start_names_the_part_and_leaves_nothing(
    cluster: Session, tmp_path: Path
) -> None:
    role = Role("reward", "reward", NeverReady)
    named = r"reward rank 0 .*start \(build\) makes no progress: .* done nothing for .*\(run.stall_s = 10\)"
    with pytest.raises(DeadlineExceeded, match=named) as caught:
        start_groups([processes("reward", 1)], [role], stall_s=10, log_dir=tmp_path)
    assert "time.sleep(60)" in caught.value.detail
    wait_until_released(cluster)


@pytest.mark.cluster
def test_what_the_cluster_does_not_have_is_refused_at_once(
    cluster: Session, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError) as caught:
        start_groups(
            [processes("trainer", 3, cpus=2.0)], [], stall_s=60, log_dir=tmp_path
        )
    assert "the run requests 6 CPU in 3 bundles" in str(caught.value)
    assert "has 4 CPU" in str(caught.value)
    wait_until_released(cluster)
