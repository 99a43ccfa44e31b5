"""A service that scores is away: evaluations wait for it, and a stop does not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from controllers.rollouts.graders import OUTAGES
from controllers.rollouts.producer import Producer
from controllers.system.plan import plan_processes, resolve_on
from controllers.trainers.rl import Trainer
from tests.controllers.conftest import MakeTrainer
from tests.controllers.run.test_stopping import stoppable as stoppable
from tests.controllers.runs import SHAPE, Inputs
from tests.layouts import GradedByModel
from tests.rewards.services import Items, Reply, Service, lengths
from tests.surroundings import ScoringService
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.signals import all_or_nothing, deferring_signals, finishing
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.errors import Interrupted
from verl_ray.profiling.phases import Timers
from verl_ray.rewards.health import ScoreHealth
from workers.generation import EVALUATION, TRAINING

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]


@pytest.fixture
def run(trainer: MakeTrainer) -> Trainer:
    found = trainer("ppo")
    found.publish(7)
    return found


class Graded:
    """Responses of a run that a service scores, which two ranks ask."""

    def __init__(self, run: Trainer, producer: Producer) -> None:
        self._prompts = run.prompts.all(8)
        self.producer = producer

    def begin(self) -> RolloutBuffer:
        generation = self.producer.evaluation_generation()
        buffer = RolloutBuffer(generation.group_size, staleness=0)
        self.producer.begin(self._prompts, generation, buffer, 7)
        return buffer

    def evaluate(self) -> Experience:
        buffer = self.begin()
        return self.producer.take(self._prompts.group_id, buffer, 7, Timers())

    def outage_s(self, purpose: str) -> float:
        (outage_s,) = self.producer.outage_metrics(purpose, 7).values()
        return outage_s


@pytest.fixture
def service() -> Iterator[Service]:
    with ScoringService() as found:
        yield found


@pytest.fixture
def graded(
    run: Trainer, service: Service, inputs: Inputs, tmp_path: Path
) -> Iterator[Graded]:
    sampled = GradedByModel(inputs.model, inputs.train, inputs.validation)
    config = sampled.config(
        "ppo", tmp_path, "reward=http", f"reward.url='{service.url}'",
        "reward.num_ranks=2", "reward.backoff_s=0.1", "reward.max_attempts=1",
        "rollout.stream_rows=3",
    )  # fmt: skip
    plan = plan_processes(resolve_on(config, SHAPE), SHAPE)
    role = plan.roles["reward"]
    sets = [
        replace(process_set, cpus_per_rank=0.25)
        for process_set in plan.sets
        if process_set.name == "reward"
    ]
    with start_groups(sets, [role], stall_s=240, log_dir=tmp_path / "logs") as groups:
        yield Graded(run, Producer(config, run.replicas, {"reward": groups[role]}))


@pytest.mark.usefixtures("stoppable")
def test_an_evaluation_waits_for_a_service_and_a_stop_does_not(
    run: Trainer, graded: Graded, service: Service
) -> None:
    expected = graded.evaluate().scores["reward"]
    assert graded.outage_s(EVALUATION) == 0.0
    asked = threading.Event()

    def away(number: int, items: Items) -> Reply:
        asked.set()
        return Reply(b"", status=503)

    def come_back() -> None:
        asked.wait()
        time.sleep(0.3)
        service.behave = lambda number, items: lengths(items)

    service.behave = away
    waker = threading.Thread(target=come_back)
    waker.start()
    began = time.monotonic()
    waited = graded.evaluate().scores["reward"]
    waker.join()
    assert waited.row("health").tolist() == [ScoreHealth.OK] * 8
    assert waited.row("score").tolist() == expected.row("score").tolist()
    # It counts once, for whoever asks first.
    assert 0.3 <= graded.outage_s(EVALUATION) < time.monotonic() - began
    assert graded.producer.outage_metrics(TRAINING, 8) == {OUTAGES[TRAINING]: 0.0}
    # Functions have none.
    assert run.producer.outage_metrics(TRAINING, 8) == {}

    def stop(number: int, items: Items) -> Reply:
        service.behave = away
        os.kill(os.getpid(), signal.SIGTERM)
        return away(number, items)

    service.behave = stop
    with pytest.raises(Interrupted), deferring_signals():
        graded.evaluate()
    # A step whose update has begun is given up: only its version makes the next groups.
    with finishing(), all_or_nothing() as work, pytest.raises(Interrupted):
        work.can_be_redone = lambda: True
        graded.begin()
        graded.producer.finish()
    # So that the ranks can close.
    service.behave = lambda number, items: lengths(items)
