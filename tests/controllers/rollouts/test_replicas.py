"""Replicas that are killed or stopped while they generate come back.

No response is lost, and none is generated twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from controllers.devices import DeviceSharing, SharingPlan
from controllers.publishing.publisher import Publisher
from controllers.publishing.wire import Receivers
from controllers.rollouts.replicas import Replicas
from controllers.rollouts.supervisor import Replica, ReplicaSupervisor
from controllers.trainers.rl import Trainer
from tests.cluster.crew import HangsAgain, answers, processes
from tests.controllers.runs import Inputs, Samplers, replicas_of, start_some, training
from tests.ports import free_port
from tests.waiting import until
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import TICK_S, put, read
from verl_ray.columns.batch import offsets_of
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Finish, Requests, Responses, Rollouts
from verl_ray.errors import RolloutError, WeightSyncError, WorkerDied, WorkerError
from verl_ray.rollout.requests import Sampling
from workers.rollout import RolloutWorker

pytestmark = [pytest.mark.cluster, pytest.mark.vllm, pytest.mark.timeout(400)]

PROMPTS, GROUP = 24, 2


def free_ports(count: int) -> int:
    """Return the first of some successive ports that nobody uses."""
    while True:
        first = free_port()
        try:
            for port in range(first + 1, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


@pytest.fixture(scope="module")
def run(
    cluster: Session, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    """A trainer with two replicas.

    Each generates eight responses at a time, and hands on every single one.
    """
    folder = tmp_path_factory.mktemp("servers")
    config = inputs.config(
        "grpo", folder, "rollout.num_replicas=2", "rollout.stream_rows=1", "rollout.concurrency=8",
        "rollout.max_response_tokens=24", f"rollout.group_size={GROUP}", "rollout.health.interval_s=0.2",
        "rollout.health.deadline_s=20", "run.recovery.max_restarts=1", "rollout.endpoint.enabled=true",
        f"rollout.endpoint.port={free_ports(2)}", "data.max_prompt_tokens=500",
    )  # fmt: skip
    groups, by_name = start_some(config, folder, sampling=True)
    with (
        groups,
        training(
            config, Samplers(replicas_of(config, groups), by_name["reward"])
        ) as trainer,
    ):
        trainer.publish(0)
        replicas = trainer.replicas
        yield trainer
        replicas.close()
        assert not (folder / "endpoints.json").exists()


def generated(
    run: Trainer, at_first_piece: Callable[[], None] = lambda: None
) -> tuple[Rollouts, list[Rollouts]]:
    """Return all rollouts by row id, and the pieces in which they arrived."""
    what = run.producer.training_generation()
    what = replace(what, sampling=replace(what.sampling, stop_token_ids=()))
    job = run.replicas.scheduler.open(run.prompts.all(PROMPTS), what)
    while not job.finished:
        run.replicas.advance(TICK_S)
    at_first_piece()
    while job.num_pending:
        run.replicas.advance(TICK_S)
    pieces = list(job.finished)
    whole = Sharded.concat(pieces)
    order = np.argsort(whole.row("row_id"), kind="stable")
    return read(whole.select(order), 60), [read(piece, 60) for piece in pieces]


def pid(run: Trainer, replica: int) -> int:
    process_info = run.replicas.available[replica].members()[0].process_info
    assert process_info is not None
    return process_info.pid


def test_two_replicas_share_the_work_and_generate_each_response_once(
    run: Trainer,
) -> None:
    rows, pieces = generated(run)
    assert rows.row_id.tolist() == list(range(PROMPTS * GROUP))
    assert sorted(Rollouts.concat(pieces).row_id.tolist()) == rows.row_id.tolist()
    assert set(rows.response_length.tolist()) == {24}
    again, _ = generated(run)
    assert again.tokens.tolist() == rows.tokens.tolist()
    assert again.rollout_log_probs.tolist() == rows.rollout_log_probs.tolist()


def endpoints(run: Trainer) -> list[str]:
    """Return the URLs at which clients find the replicas."""
    listed = json.loads((Path(run.config.run.dir) / "endpoints.json").read_text())
    assert {entry["model"] for entry in listed} == {run.config.run.name}
    return [entry["url"] for entry in listed]


def ask(url: str, **more: object) -> httpx.Response:
    asked = {
        "prompt": "1+1=",
        "max_tokens": 24,
        "seed": 3,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    return httpx.post(f"{url}/completions", json=asked, timeout=60)


def versions(answer: httpx.Response) -> list[list[int]]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["policy_versions"]


def test_clients_are_answered_by_every_replica_and_stop_neither_rollouts_nor_weights(
    run: Trainer,
) -> None:
    expected, _ = generated(run)
    urls = endpoints(run)
    assert (
        len(set(urls)) == 2 and [versions(ask(url)) for url in urls] == [[[0, 0]]] * 2
    )
    answers: list[httpx.Response] = []
    done = threading.Event()

    def keep_asking(url: str) -> None:
        while not done.is_set():
            answers.append(ask(url, n=4))

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, url) for url in urls * 2]
        try:
            for version in (10, 11, 12):
                run.publish(version)
                rows, _ = generated(run)
                assert rows.tokens.tolist() == expected.tokens.tolist()
                assert set(rows.version_spans.values[:, 1].tolist()) == {version}
        finally:
            done.set()
        for one in asking:
            one.result(60)
    assert {answer.status_code for answer in answers} <= {200, 503}
    choices = [
        choice
        for answer in answers
        if answer.status_code == 200
        for choice in answer.json()["choices"]
    ]
    assert {choice["finish_reason"] for choice in choices} <= {"length", "abort"}
    whole = {
        tuple(choice["token_ids"])
        for choice in choices
        if choice["finish_reason"] == "length"
    }
    assert len(whole) == 4  # of four seeds, whatever was generated at the same time
    assert {
        version for choice in choices for _, version in choice["policy_versions"]
    } >= {10, 11, 12}


def taken_over(url: str) -> socket.socket:
    """Listen where a replica listens, as soon as it does so no more."""
    address = httpx.URL(url)
    taken: list[socket.socket] = []

    def take() -> bool:
        with contextlib.suppress(OSError):
            taken.append(socket.create_server((address.host, address.port or 0)))
        return bool(taken)

    until(take)
    return taken[0]


def is_listed(run: Trainer, url: str) -> bool:
    """Whether clients find a replica, whose state was requested again."""
    run.replicas._supervisor.fence_unhealthy()
    return url in endpoints(run)


def test_a_replica_whose_port_is_taken_generates_and_answers_once_it_is_free(
    run: Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    run.publish(3)
    expected, _ = generated(run)
    urls = endpoints(run)
    os.kill(pid(run, 1), signal.SIGKILL)
    with taken_over(urls[1]) as holder:
        generated(run)
        victim = run.replicas._supervisor.wait_for_replicas(all_of_them=True)[1]
        run.publish(3)  # the loss of another one would stop the run
        rows, _ = generated(run)
        assert rows.tokens.tolist() == expected.tokens.tolist()
        assert answers(victim, "status")[0].health["rollout"].steps > 20
        assert not is_listed(run, urls[1]) and endpoints(run) == urls[:1]
        info = victim.members()[0].process_info
        assert info is not None and info.log_path in capfd.readouterr().err
        assert f"(process {os.getpid()})" in Path(info.log_path).read_text()
        holder.close()
        until(lambda: is_listed(run, urls[1]))
    assert endpoints(run) == urls
    assert [versions(ask(url)) for url in urls] == [[[0, 3]]] * 2


@pytest.mark.parametrize(
    "how",
    # A replica that hangs is found in the tests of weights below.
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)],
)
def test_what_a_lost_replica_leaves_pending_goes_to_the_other_and_it_comes_back(
    run: Trainer, capsys: pytest.CaptureFixture[str], how: signal.Signals
) -> None:
    expected, _ = generated(run)
    version = 1 if how == signal.SIGKILL else 2
    run.publish(version)
    run.replicas.take_counts()
    victim = run.replicas.available[1]
    process = pid(run, 1)
    rows, pieces = generated(run, lambda: os.kill(process, how))
    assert (
        sorted(Rollouts.concat(pieces).row_id.tolist())
        == list(range(PROMPTS * GROUP))
        == rows.row_id.tolist()
    )
    assert (
        rows.tokens.tolist() == expected.tokens.tolist()
    )  # the same seeds, so the same responses
    assert set(rows.version_spans.values[:, 1].tolist()) == {version}
    counts = run.replicas.take_counts()
    assert counts["rollout/restarts"] == 1 and 1 <= counts["rollout/reissued"] <= 8
    warned = capsys.readouterr().err
    # Its stream says so, or whoever asks how it is, whichever comes first.
    reason = (
        "the process died during (generate|status)"
        if how == signal.SIGKILL
        else "rollout.health.deadline_s"
    )
    assert "rollout rank 1" in warned and re.search(reason, warned)

    assert victim in run.replicas._supervisor.wait_for_replicas(all_of_them=True)
    assert ask(endpoints(run)[1]).status_code in (
        200,
        503,
    )  # whether it has the weights yet or not
    assert pid(run, 1) != process and not _alive(process)
    run.publish(version)  # also to the one that was away
    rows, _ = generated(run)
    assert rows.tokens.tolist() == expected.tokens.tolist()
    assert [
        answers(one, "status")[0].health["rollout"].policy_version
        for one in run.replicas.available
    ] == [version] * 2
    steps = [
        answers(one, "status")[0].health["rollout"].steps
        for one in run.replicas.available
    ]
    assert min(steps) > 20  # both of them generate
    assert [versions(ask(url)) for url in endpoints(run)] == [[[0, version]]] * 2


@pytest.mark.parametrize(
    "how",
    # One that died is found in the test of what is pending above.
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP],
)
def test_a_replica_that_is_lost_while_weights_arrive_gets_them_all_the_same(
    run: Trainer, how: signal.Signals
) -> None:
    os.kill(pid(run, 0), how)
    run.publish(5)
    run.replicas._supervisor.wait_for_replicas(all_of_them=True)
    run.publish(5)
    assert [
        answers(one, "status")[0].health["rollout"].policy_version
        for one in run.replicas.available
    ] == [5, 5]


def test_a_replica_that_stops_before_the_ends_of_a_wire_have_met_keeps_nobody_waiting(
    run: Trainer,
) -> None:
    sync = run.config.rollout.sync.model_copy(
        update={"transport": "broadcast", "probe_every": 10}
    )
    config = run.config.model_copy(
        update={"rollout": run.config.rollout.model_copy(update={"sync": sync})}
    )
    actor = run.system.actor
    plan = SharingPlan(
        shares_devices=True, engines_free="weights", trainers_offload="all"
    )  # as on a GPU that they share
    device_sharing = DeviceSharing(plan, actor, [actor])
    publisher = Publisher(actor, config, device_sharing, has_gpus=False)
    replicas = Replicas(run.replicas.available, publisher, device_sharing, config)
    process = pid(run, 1)
    os.kill(process, signal.SIGSTOP)
    replicas.sync_weights(5)
    assert len(
        replicas._supervisor.wait_for_replicas(all_of_them=True)
    ) == 2 and not _alive(process)
    assert device_sharing.engine_fits
    replicas.free_devices()
    replicas.device_sharing.switch_to("training")  # all of them sleep
    assert (
        not device_sharing.engine_fits
    )  # one that is lost now starts when the trainer has gone
    assert [
        answers(one, "status")[0].health["rollout"].policy_version
        for one in run.replicas.available
    ] == [None, None]
    assert "weight_sync/probe_difference" not in replicas.sync_weights(6)
    receivers = Receivers(run.replicas.available[:1], lambda: None)
    publisher.catch_up(
        6, receivers
    )  # verified all the same, by what was requested while the actor was there
    assert publisher._verification.probe_of(6) is not None
    assert [
        answers(one, "status")[0].health["rollout"].policy_version
        for one in run.replicas.available
    ] == [6, 6]


def test_requests_go_on_over_a_weight_update(run: Trainer) -> None:
    replica = run.replicas.available[0]
    asked = Requests(
        offsets=offsets_of([4]), request_id=np.array([9]), seed=np.array([1]), session=np.array([0]),
        tokens=np.array([3, 4, 5, 6], np.int32),
    )  # fmt: skip
    sampling = Sampling(1.0, 1.0, -1, 400, ())
    alone = _whole([read(part, 60) for part in _respond(replica, asked, sampling)])

    # An engine may be done before the pause reaches it: then the row is drawn again.
    for version in range(6, 16):
        run.publish(version)
        whole = _over_an_update(run, replica, asked, sampling, version + 1)
        assert whole.tokens.tolist() == alone.tokens.tolist()  # of the same weights
        assert whole.finish.tolist()[-1] == Finish.LENGTH
        versions = whole.version_spans.values[:, 1].tolist()
        if versions[-1] != version:
            break
    assert versions[0] == version
    assert versions[-1] == version + 1
    assert versions == sorted(versions)


def _over_an_update(
    run: Trainer, replica: Replica, asked: Requests, sampling: Sampling, version: int
) -> Responses:
    """Return rows under which `version` is published once they have begun."""
    parts: list[Responses] = []
    for part in _respond(replica, asked, sampling):
        if len(parts) == 1:
            for one in run.replicas.available:
                one.broadcast(RolloutWorker.pause, "keep").result()
            run.publish(version)
            for one in run.replicas.available:
                one.broadcast(RolloutWorker.resume).result()
        parts.append(read(part, 60))
    return _whole(parts)


def test_a_verification_that_fails_stops_the_run_and_names_what_could_be_wrong(
    run: Trainer,
) -> None:
    replica = run.replicas.available[0]
    publisher = run.replicas._publisher
    publisher._verification._tolerance = 1e-12
    with pytest.raises(
        WeightSyncError,
        match=r"every weight arrived as it was sent.*vLLM repacks .*lm_head",
    ) as caught:
        publisher.catch_up(20, Receivers((replica,), lambda: None))
    assert caught.value.origin is not None and caught.value.origin.role == "rollout"
    with pytest.raises(WorkerError, match="failed earlier and was not restarted"):
        generated(run)


def test_too_many_lost_replicas_stop_the_run(run: Trainer) -> None:
    replica = run.replicas.available[1]
    recovery = run.config.run.recovery.model_copy(update={"max_restarts": 0})
    run_section = run.config.run.model_copy(update={"recovery": recovery})
    config = run.config.model_copy(update={"run": run_section})
    process = pid(run, 1)
    device_sharing, publisher = run.replicas.device_sharing, run.replicas._publisher
    run.replicas = Replicas([replica], publisher, device_sharing, config)
    run.replicas._up_to_date = {(replica, replica.incarnation)}
    # Its stream says so, or whoever asks how it is, whichever comes first.
    died = r"the process died during (generate|status)"
    with pytest.raises(WorkerDied, match=died) as caught:
        generated(run, lambda: os.kill(process, signal.SIGKILL))
    assert (
        "more than run.recovery.max_restarts = 0 replicas" in caught.value.__notes__[0]
    )
    # Nobody waits for one that does not start again.
    with pytest.raises(RolloutError, match="no replica is left to generate"):
        run.replicas.advance(TICK_S)


def _respond(
    replica: Replica, asked: Requests, sampling: Sampling
) -> Iterator[Sharded[Responses]]:
    return replica.stream(RolloutWorker.respond, put(asked), sampling)


def _whole(parts: list[Responses]) -> Responses:
    return Responses.concat(parts)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_replica_that_hangs_as_it_restarts_is_ended(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.config("grpo", tmp_path).rollout.health
    role = Role("rollout", "rollout", HangsAgain)
    sets = [replace(processes("rollout", 2, cpus=0.1), replicas=True)]
    with start_groups(sets, [role], stall_s=3600, log_dir=tmp_path) as groups:
        lost, waiting = groups.replicas(role)
        device_sharing = SimpleNamespace(engine_fits=True)
        supervisor = ReplicaSupervisor([lost, waiting], config, 3, device_sharing)  # type: ignore[arg-type]  # it asks for nothing else
        supervisor.handle_failure(
            WorkerDied("it was killed", role="rollout", rank=0, node="here")
        )
        while lost.incarnation == 1 or not any(
            status.running for status in answers(lost, "status")
        ):
            assert supervisor.take_started() == []
            time.sleep(0.05)
        device_sharing.engine_fits = (
            False  # the other one does not begin: it waits for memory
        )
        supervisor.handle_failure(
            WorkerDied("it was killed", role="rollout", rank=1, node="here")
        )
        assert supervisor.take_started() == [] and supervisor.restarting
        closing = threading.Thread(target=supervisor.close, daemon=True)
        closing.start()
        closing.join(timeout=120)  # of the hour that the restart may take
        assert not closing.is_alive()
        assert waiting.incarnation == 1
