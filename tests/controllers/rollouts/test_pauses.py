"""Replicas whose open rows stand still, and what may happen meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from controllers.devices import DeviceSharing, SharingPlan
from controllers.publishing import wire
from controllers.publishing.publisher import Publisher
from controllers.rollouts.generation import GenerationJob
from controllers.rollouts.replicas import Replicas
from controllers.trainers.rl import Trainer
from tests.cluster.crew import answers
from tests.controllers.runs import Inputs, Samplers, replicas_of, start_some, training
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import TICK_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]

PATIENCE_S = 120.0


@pytest.fixture
def run(
    cluster: Session, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    """A trainer that takes turns with one replica, as on a GPU that they share."""
    folder = tmp_path_factory.mktemp("turns")
    config = inputs.config(
        "grpo", folder, "schedule=carry_over", "rollout.stream_rows=1", "data.max_prompt_tokens=500",
        "rollout.max_response_tokens=1500", "rollout.group_size=2", "rollout.health.interval_s=0.2",
    )  # fmt: skip
    groups, by_name = start_some(config, folder, sampling=True)
    samplers = Samplers(replicas_of(config, groups), by_name["reward"])
    with groups, training(config, samplers) as trainer:
        actor = trainer.system.actor
        plan = SharingPlan(
            shares_devices=True, engines_free="weights", trainers_offload="all"
        )
        sharing = DeviceSharing(plan, actor, [actor])
        publishing = Publisher(actor, trainer.config, sharing, has_gpus=False)
        trainer.replicas = Replicas(
            trainer.replicas.available, publishing, sharing, trainer.config
        )
        yield trainer
        trainer.replicas.close()


def test_a_long_pause_is_no_stall(run: Trainer) -> None:
    replicas = run.replicas
    replicas.sync_weights(0)
    job = _begin(run)
    replicas.free_devices()
    replicas.device_sharing.switch_to("training")
    (replica,) = replicas.available
    limit_s = replica.stall_s
    _set_limit(replicas, 2.0)

    # The trainers learn for longer than a replica may make no progress.
    _advance_for(replicas, seconds=6)
    assert job.num_pending
    # What follows may take as long as it does on a busy machine.
    _set_limit(replicas, limit_s)
    replicas.sync_weights(1)
    while job.num_pending:
        replicas.advance(TICK_S)
    assert replicas.take_counts()["rollout/restarts"] == 0


def test_a_replica_lost_in_a_pause_starts_again_once_there_is_memory(
    run: Trainer,
) -> None:
    replicas = run.replicas
    replicas.sync_weights(0)
    job = _begin(run)
    replicas.free_devices()
    replicas.device_sharing.switch_to("training")
    os.kill(_pid(replicas.available[0]), signal.SIGKILL)
    while replicas.available:
        replicas.advance(TICK_S)
    assert replicas._supervisor.restarting

    replicas.sync_weights(1)
    while job.num_pending:
        replicas.advance(TICK_S)
    assert replicas.take_counts()["rollout/restarts"] == 1


def test_a_replica_that_is_lost_again_before_it_has_its_weights_comes_back(
    run: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sends the weights is told of it, and waits for no process that only starts."""
    replicas = run.replicas
    replicas.sync_weights(0)
    job = _begin(run)
    actor = _pid(run.system.actor)
    (replica,) = replicas.available
    os.kill(_pid(replica), signal.SIGKILL)
    # The sender waits for the replica for less time than it takes to start.
    patience = wire.PEER_TIMEOUT_FRACTION
    monkeypatch.setattr(wire, "PEER_TIMEOUT_FRACTION", 2.4 / replica.stall_s)

    opening = threading.Event()
    wire_spec = wire.WeightWire._wire_spec

    def told_wire_spec(self: Any, replicas: Any) -> Any:
        spec = wire_spec(self, replicas)
        opening.set()
        return spec

    monkeypatch.setattr(wire.WeightWire, "_wire_spec", told_wire_spec)

    def lose_it_again() -> None:
        try:
            # The replica has started again, and the actor was told to wait for it.
            assert opening.wait(PATIENCE_S)
            monkeypatch.setattr(wire, "PEER_TIMEOUT_FRACTION", patience)
            lost = psutil.Process(_pid(replica))
            lost.kill()
            lost.wait(PATIENCE_S)
        finally:
            os.kill(actor, signal.SIGCONT)

    # An actor that does not reply: the replica waits for it, as for one that learns.
    thread = threading.Thread(target=lose_it_again)
    thread.start()
    try:
        os.kill(actor, signal.SIGSTOP)
        while job.num_pending:
            replicas.advance(TICK_S)
    finally:
        # Whatever has failed, nothing that is stopped stays behind.
        with contextlib.suppress(ProcessLookupError):
            os.kill(actor, signal.SIGCONT)
        thread.join()
    assert replicas.take_counts()["rollout/restarts"] == 2


def _set_limit(replicas: Replicas, stall_s: float) -> None:
    """Set for how long the replica may make no progress, in open calls and in later
    ones.
    """
    for call in replicas.scheduler._calls:
        call.stream.rank_call = replace(call.stream.rank_call, stall_s=stall_s)
    (replica,) = replicas.available
    replica._processes.stall_s = stall_s


def _pid(group: WorkerGroup[Any]) -> int:
    info = group.members()[0].process_info
    assert info is not None
    return info.pid


def _begin(run: Trainer) -> GenerationJob:
    """Begin to generate long responses, all of which are still open."""
    replicas = run.replicas
    generation = run.producer.training_generation()
    sampling = replace(generation.sampling, stop_token_ids=())
    generation = replace(generation, sampling=sampling)
    job = replicas.scheduler.open(run.prompts.all(16), generation)
    while answers(replicas.available[0], "status")[0].health["rollout"].steps < 20:
        replicas.advance(TICK_S)
    assert job.num_pending
    return job


def _advance_for(replicas: Replicas, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        replicas.advance(TICK_S)
